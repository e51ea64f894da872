#include "worker/kernels/cuda/plan/probability_plan.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace ringattn::worker::cuda {
namespace {

// The document of rows that no piece contains.
constexpr int64_t kNoDocument = -1;

struct PlacedRow {
  ChosenRowLocation row;
  int64_t document = kNoDocument;  // index among the call's pieces, unlike row.document
  const Piece* piece = nullptr;
};

struct BlockSpan {
  const KvBlock* block;
  const Piece* piece;
};

// Returns null for a row without a document.
const Piece* PieceOf(const std::map<int64_t, const Piece*>& by_first_row, int64_t local_row) {
  auto after = by_first_row.upper_bound(local_row);
  if (after == by_first_row.begin()) return nullptr;
  const Piece* piece = std::prev(after)->second;
  return local_row < piece->local_begin + piece->length ? piece : nullptr;
}

std::vector<PlacedRow> PlaceRows(const ProbabilitiesCall& call) {
  const AttentionProblem& problem = *call.problem;
  std::map<int64_t, const Piece*> queries;
  for (const Piece& piece : call.q_pieces) {
    if (piece.length > 0) queries[piece.local_begin] = &piece;
  }
  std::vector<PlacedRow> rows;
  for (size_t i = 0; i < call.rows.size(); ++i) {
    PlacedRow placed;
    placed.row.batch = call.rows[i].batch;
    placed.row.local_row = call.rows[i].row;
    placed.row.target_row = static_cast<int32_t>(i);
    if (const Piece* piece = PieceOf(queries, call.rows[i].row)) {
      const Band& band = problem.bands[piece->document];
      placed.piece = piece;
      placed.document = piece->document;
      placed.row.position = piece->PositionOf(call.rows[i].row - piece->local_begin);
      placed.row.lower = band.lower;
      placed.row.upper = band.upper;
      // A problem without terms may have no shifts.
      if (!problem.terms.shifts.empty()) placed.row.shift = problem.terms.shifts[piece->document];
      placed.row.document =
          static_cast<int32_t>(problem.terms.BatchRow(piece->document, piece->document));
    }
    rows.push_back(placed);
  }
  std::stable_sort(rows.begin(), rows.end(), [](const PlacedRow& a, const PlacedRow& b) {
    return std::tie(a.row.batch, a.document, a.row.position) <
           std::tie(b.row.batch, b.document, b.row.position);
  });
  return rows;
}

// Rows [begin, end) of one batch row and document.
struct Group {
  int32_t begin = 0;
  int32_t end = 0;
};

std::vector<Group> GroupsOf(const std::vector<PlacedRow>& rows) {
  std::vector<Group> groups;
  for (int32_t i = 0; i < static_cast<int32_t>(rows.size()); ++i) {
    if (rows[i].document == kNoDocument) continue;
    const bool joins = i > 0 && rows[i - 1].row.batch == rows[i].row.batch &&
                       rows[i - 1].document == rows[i].document;
    if (!joins) groups.push_back({i, i});
    groups.back().end = i + 1;
  }
  return groups;
}

// Returns the smallest range that contains every key of `keys` that rows [begin, end) see.
RowRange SeenKeys(const ProbabilitiesCall& call, const std::vector<PlacedRow>& rows, int32_t begin,
                  int32_t end, const Piece& keys) {
  RowRange hull;
  for (int32_t i = begin; i < end; ++i) {
    const Piece& q = *rows[i].piece;
    const RowRange seen =
        KeysOfRow(q, rows[i].row.local_row - q.local_begin, keys, call.problem->bands[q.document]);
    if (seen.empty()) continue;
    hull.begin = hull.empty() ? seen.begin : std::min(hull.begin, seen.begin);
    hull.end = std::max(hull.end, seen.end);
  }
  return hull;
}

ProbabilityTile TileOf(const AttentionProblem& problem, const BlockSpan& keys,
                       const RowRange& range) {
  ProbabilityTile tile;
  tile.k = keys.block->k;
  if (problem.terms.segment_ids) tile.segment_ids = keys.block->segment_ids;
  tile.block_rows = keys.block->rows;
  tile.row_begin = keys.piece->local_begin + range.begin;
  tile.k_position = keys.piece->PositionOf(range.begin);
  tile.k_stride = keys.piece->stride;
  tile.row_count = static_cast<int32_t>(range.size());
  return tile;
}

// Splits tiles along their keys until there are about `target_tiles`.
std::vector<ProbabilityTile> Cut(const std::vector<ProbabilityTile>& whole, int64_t target_tiles) {
  int64_t keys = 0;
  for (const ProbabilityTile& tile : whole) keys += tile.row_count;
  const int64_t most = keys / std::max<int64_t>(target_tiles, 1) + 1;
  const int64_t cut = (most + kProbabilityKeys - 1) / kProbabilityKeys * kProbabilityKeys;
  std::vector<ProbabilityTile> tiles;
  for (const ProbabilityTile& tile : whole) {
    for (int64_t first = 0; first < tile.row_count; first += cut) {
      ProbabilityTile part = tile;
      part.row_begin += first;
      part.k_position += part.k_stride * first;
      part.row_count = static_cast<int32_t>(std::min(cut, tile.row_count - first));
      tiles.push_back(part);
    }
  }
  return tiles;
}

}  // namespace

ProbabilityPlan PlanProbabilities(const ProbabilitiesCall& call, int64_t target_tiles) {
  const AttentionProblem& problem = *call.problem;
  const auto group_size = static_cast<int32_t>(problem.num_heads / problem.num_kv_heads);
  const std::vector<PlacedRow> rows = PlaceRows(call);
  const std::vector<Group> groups = GroupsOf(rows);
  std::map<int64_t, std::vector<BlockSpan>> keys_of;  // by document
  for (const KvBlock& block : call.blocks) {
    for (const Piece& piece : block.pieces) {
      if (piece.length > 0) keys_of[piece.document].push_back({&block, &piece});
    }
  }
  ProbabilityPlan plan;
  for (const PlacedRow& each : rows) plan.rows.push_back(each.row);
  // The kernel for many pairs costs the same for any number of pairs.
  int32_t most_pairs = 0;
  for (const Group& group : groups) {
    most_pairs = std::max(most_pairs, (group.end - group.begin) * group_size);
  }
  if (most_pairs <= 2 * kFewProbabilityPairs) plan.tile_pairs = kFewProbabilityPairs;
  std::vector<ProbabilityTile> whole;
  for (const Group& group : groups) {
    const int32_t end = group.end * group_size;
    for (int32_t pair = group.begin * group_size; pair < end; pair += plan.tile_pairs) {
      const int32_t count = std::min(plan.tile_pairs, end - pair);
      for (const BlockSpan& keys : keys_of[rows[group.begin].document]) {
        const RowRange seen = SeenKeys(call, rows, pair / group_size,
                                       (pair + count - 1) / group_size + 1, *keys.piece);
        if (seen.empty()) continue;
        ProbabilityTile tile = TileOf(problem, keys, seen);
        tile.pair_begin = pair;
        tile.pair_count = count;
        whole.push_back(tile);
      }
    }
  }
  plan.tiles = Cut(whole, target_tiles);
  return plan;
}

}  // namespace ringattn::worker::cuda

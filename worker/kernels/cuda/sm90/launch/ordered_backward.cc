#include "worker/kernels/cuda/sm90/launch/ordered_backward.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/sm90/launch/call_terms.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int kGroups = 2;  // of consumers, each with separate counters

// From q tile `begin` of a range to the next run: `after` is the counter value of the preceding key
// tile.
struct Run {
  int32_t begin;
  int32_t after;
};

int32_t TilesOf(int64_t rows, int32_t tile_rows) {
  return static_cast<int32_t>((rows + tile_rows - 1) / tile_rows);
}

// Returns the runs of the range of key tile `number`, whose first q tile is `first`. Records
// `number` as the last key tile at those q tiles.
std::vector<Run> Visit(int32_t first, int32_t tiles, int32_t number, std::vector<int32_t>& last) {
  std::vector<Run> runs;
  for (int32_t i = 0; i < tiles; ++i) {
    int32_t& before = last[first + i];
    if (runs.empty() || runs.back().after != before) runs.push_back({i, before});
    before = number + 1;
  }
  return runs;
}

}  // namespace

BackwardTurns TakeTurns(const std::vector<Piece>& q_pieces, int32_t tile_rows, BackwardPlan& plan) {
  BackwardTurns turns;
  std::vector<int32_t> piece_tiles;  // the first tile of each piece
  for (const Piece& piece : q_pieces) {
    piece_tiles.push_back(turns.query_tiles);
    turns.query_tiles += TilesOf(piece.length, tile_rows);
  }
  const auto first_of = [&](const QRange& range) {
    const int64_t row = range.row_begin - q_pieces[range.piece].local_begin;
    return piece_tiles[range.piece] + static_cast<int32_t>(row / tile_rows);
  };
  const auto visit = [&](int32_t number, int32_t index, std::vector<int32_t>& last) {
    const QRange& range = plan.ranges[index];
    return Visit(first_of(range), TilesOf(range.row_count, tile_rows), number, last);
  };

  const int32_t tiles = static_cast<int32_t>(plan.tiles.size());
  std::vector<std::vector<Run>> turned(plan.ranges.size());
  std::vector<int32_t> last(turns.query_tiles, 0);
  for (int32_t number = tiles - 1; number >= 0; --number) {
    const BackwardTile& tile = plan.tiles[number];
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) turned[i] = visit(number, i, last);
  }
  std::fill(last.begin(), last.end(), 0);
  std::vector<QRange> cut;
  for (int32_t number = 0; number < tiles; ++number) {
    BackwardTile& tile = plan.tiles[number];
    const int32_t begin = static_cast<int32_t>(cut.size());
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const QRange& range = plan.ranges[i];
      const int32_t range_tiles = TilesOf(range.row_count, tile_rows);
      const std::vector<Run> runs = visit(number, i, last);
      size_t a = 0, b = 0;
      for (int32_t at = 0; at < range_tiles;) {
        const int32_t end =
            std::min(a + 1 < runs.size() ? runs[a + 1].begin : range_tiles,
                     b + 1 < turned[i].size() ? turned[i][b + 1].begin : range_tiles);
        const int32_t row = at * tile_rows;
        cut.push_back(RowsOf(range, row, std::min(end * tile_rows, range.row_count) - row));
        turns.ranges.push_back({runs[a].after, turned[i][b].after, first_of(range) + at});
        at = end;
        if (a + 1 < runs.size() && runs[a + 1].begin == at) ++a;
        if (b + 1 < turned[i].size() && turned[i][b + 1].begin == at) ++b;
      }
    }
    tile.range_begin = begin;
    tile.range_end = static_cast<int32_t>(cut.size());
  }
  plan.ranges = std::move(cut);
  return turns;
}

QueryVisits VisitsOf(const BackwardPlan& plan, const BackwardTurns& turns, int32_t tile_rows) {
  QueryVisits result;
  result.begins.resize(turns.query_tiles + 1);
  // Calls visit(q tile, pair, index of the key tile) with pairs counted over all ranges.
  const std::vector<int64_t> pair_begins = PairBegins(plan.ranges, tile_rows);
  const auto for_all = [&](const auto& visit) {
    for (size_t number = 0; number < plan.tiles.size(); ++number) {
      const BackwardTile& tile = plan.tiles[number];
      for (int32_t r = tile.range_begin; r < tile.range_end; ++r) {
        const int32_t first = static_cast<int32_t>(pair_begins[r]);
        const int32_t count = static_cast<int32_t>(pair_begins[r + 1]) - first;
        for (int32_t i = 0; i < count; ++i) {
          visit(turns.ranges[r].first_tile + i, first + i, static_cast<int32_t>(number));
        }
      }
    }
  };
  for_all([&](int32_t q_tile, int32_t, int32_t) { ++result.begins[q_tile + 1]; });
  std::partial_sum(result.begins.begin(), result.begins.end(), result.begins.begin());
  result.visits.resize(result.begins.back());
  std::vector<int32_t> next(result.begins.begin(), result.begins.end() - 1);
  for_all([&](int32_t q_tile, int32_t pair, int32_t number) {
    result.visits[next[q_tile]++] = {pair, number};
  });
  return result;
}

absl::Status CallTurns::Init(const BackwardCall& call, int32_t tile_rows,
                             const BackwardKernelParams& params, BackwardPlan& plan) {
  any_ = true;
  const ScoreTerms& terms = call.problem->terms;
  BackwardTurns turns = TakeTurns(call.q_pieces, tile_rows, plan);
  const int64_t pairs = PairBegins(plan.ranges, tile_rows).back();
  if (pairs > std::numeric_limits<int32_t>::max()) {
    return absl::ResourceExhaustedError(absl::StrCat("a deterministic backward call has ", pairs,
                                                     " pairs of tiles; the maximum is 2147483647"));
  }
  has_visits_ = terms.segment_ids || terms.mask.has_value();
  if (has_visits_) visits_ = VisitsOf(plan, turns, tile_rows);
  if (terms.mask.has_value() && terms.mask->per_head) params_.turn_heads = params.common.num_heads;
  ranges_ = std::move(turns.ranges);
  params_.query_tiles = turns.query_tiles;
  const int32_t sections = (params.packs + params.section_packs - 1) / params.section_packs;
  params_.turned_sections = sections > 1 ? sections - 1 : sections;
  begins_offset_ = TableBytes(ranges_);
  visits_offset_ = begins_offset_ + TableBytes(visits_.begins);
  table_bytes_ = visits_offset_ + TableBytes(visits_.visits);
  const int64_t batch = params.common.batch;
  queries_offset_ = kTableAlignment;  // after the tickets
  keys_offset_ = queries_offset_ + AlignUp(batch * params.common.num_heads * turns.query_tiles *
                                           kGroups * static_cast<int64_t>(sizeof(int32_t)));
  const bool shared_sums = params.heads_per_block < params.common.group_size;
  pair_turns_offset_ = keys_offset_;
  if (shared_sums) {
    pair_turns_offset_ += AlignUp(batch * params.common.num_kv_heads * params.tile_count * kGroups *
                                  static_cast<int64_t>(sizeof(int32_t)));
  }
  scratch_bytes_ = pair_turns_offset_;
  if (has_visits_) {
    scratch_bytes_ +=
        AlignUp(batch * params_.turn_heads * pairs * 2 * static_cast<int64_t>(sizeof(int32_t)));
  }
  return absl::OkStatus();
}

void CallTurns::WriteTables(void* tables) const {
  WriteTable(ranges_, tables, 0);
  WriteTable(visits_.begins, tables, begins_offset_);
  WriteTable(visits_.visits, tables, visits_offset_);
}

void CallTurns::DropTables() {
  ranges_ = {};
  visits_ = {};
}

absl::Status CallTurns::Place(const void* tables, void* scratch, cudaStream_t stream,
                              TurnParams& turns) const {
  turns = params_;
  char* const bytes = static_cast<char*>(scratch);
  turns.ranges = TableAt<QTurn>(tables, 0);
  turns.tickets = reinterpret_cast<uint32_t*>(bytes);
  turns.queries = reinterpret_cast<int32_t*>(bytes + queries_offset_);
  turns.keys = reinterpret_cast<int32_t*>(bytes + keys_offset_);
  if (has_visits_) {
    turns.visit_begins = TableAt<int32_t>(tables, begins_offset_);
    turns.visits = TableAt<QVisit>(tables, visits_offset_);
    turns.pair_turns = reinterpret_cast<int32_t*>(bytes + pair_turns_offset_);
  }
  return ToStatus(cudaMemsetAsync(scratch, 0, pair_turns_offset_, stream), "zero of turns");
}

}  // namespace ringattn::worker::cuda::sm90

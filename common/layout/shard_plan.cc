#include "common/layout/shard_plan.h"

#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ringattn {
namespace {

// Returns slice `index` of `tokens` tokens divided into `count` slices.
Span Slice(int64_t tokens, int64_t count, int64_t index) {
  const int64_t begin = tokens / count * index + tokens % count * index / count;
  const int64_t end = tokens / count * (index + 1) + tokens % count * (index + 1) / count;
  return {begin, end - begin, 1};
}

// Appends a span of stride 1. Joins it to the previous span if they touch.
void AppendSpan(Shard& shard, const Span& span) {
  if (span.length == 0) return;
  if (!shard.empty() && shard.back().begin + shard.back().length == span.begin) {
    shard.back().length += span.length;
  } else {
    shard.push_back(span);
  }
}

// Deals the stripes out in turn. Each stripe is a span; stripes of one token form one strided span.
// Longer stripes could be strided spans too (the k-th tokens of all stripes), which would shorten
// the list if there are many stripes. But then local rows would not follow the tensor's order, and
// uploads and downloads could not stream.
Shard StripedShard(int64_t tokens, int world_size, int64_t stripe, int rank) {
  if (world_size == 1) return tokens == 0 ? Shard{} : Shard{Span{0, tokens, 1}};
  Shard shard;
  if (stripe == 1) {
    if (rank < tokens) shard.push_back({rank, (tokens - rank - 1) / world_size + 1, world_size});
    return shard;
  }
  // Counted, not stepped: with a very long stripe the next begin would overflow.
  const int64_t all_stripes = tokens / stripe + (tokens % stripe != 0 ? 1 : 0);
  const int64_t stripes = (all_stripes + world_size - 1 - rank) / world_size;
  for (int64_t i = 0; i < stripes; ++i) {
    const int64_t begin = (i * world_size + rank) * stripe;
    shard.push_back({begin, std::min(stripe, tokens - begin), 1});
  }
  return shard;
}

// Tokens [begin, end) on both axes that zigzag divides separately.
struct Unit {
  int64_t q_begin = 0, q_end = 0;
  int64_t kv_begin = 0, kv_end = 0;
};

// Returns long documents and runs of short ones, in order.
std::vector<Unit> Units(const AttentionShape& shape, int world_size) {
  const int64_t longest_axis = std::max(shape.seq_len_q, shape.seq_len_kv);
  const int64_t long_from =
      std::max(2 * world_size * kLongDocumentSlice, longest_axis / kMaxUnits + 1);
  std::vector<Unit> units;
  bool run_is_open = false;
  for (size_t i = 0; i + 1 < shape.cu_seqlens_q.size(); ++i) {
    const Unit document = {shape.cu_seqlens_q[i], shape.cu_seqlens_q[i + 1], shape.cu_seqlens_k[i],
                           shape.cu_seqlens_k[i + 1]};
    const bool is_long = std::max(document.q_end - document.q_begin,
                                  document.kv_end - document.kv_begin) >= long_from;
    if (!is_long && run_is_open) {
      units.back().q_end = document.q_end;
      units.back().kv_end = document.kv_end;
    } else {
      units.push_back(document);
    }
    run_is_open = !is_long;
  }
  return units;
}

void AppendZigzag(Shard& shard, int64_t begin, int64_t end, int world_size, int rank) {
  for (int index : {rank, 2 * world_size - 1 - rank}) {
    Span slice = Slice(end - begin, 2 * world_size, index);
    slice.begin += begin;
    AppendSpan(shard, slice);
  }
}

Shard MakeShard(int64_t tokens, Layout layout, int world_size, int64_t stripe, int rank) {
  Shard shard;
  switch (layout) {
    case Layout::kContiguous:
      AppendSpan(shard, Slice(tokens, world_size, rank));
      break;
    case Layout::kZigzag:
    case Layout::kZigzagPerDocument:  // one unit
      AppendZigzag(shard, 0, tokens, world_size, rank);
      break;
    case Layout::kStriped:
      return StripedShard(tokens, world_size, stripe, rank);
  }
  return shard;
}

std::string ToString(const Shard& shard) {
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < std::min(shard.size(), kShown); ++i) {
    const Span& span = shard[i];
    absl::StrAppend(&text, text.empty() ? "" : " ");
    if (span.stride == 1) {
      absl::StrAppendFormat(&text, "[%d,%d)", span.begin, span.begin + span.length);
    } else {
      absl::StrAppendFormat(&text, "[%d,%d):%d", span.begin,
                            span.begin + (span.length - 1) * span.stride + 1, span.stride);
    }
  }
  if (shard.size() > kShown) absl::StrAppendFormat(&text, " +%d spans", shard.size() - kShown);
  return text.empty() ? "-" : text;
}

}  // namespace

const char* LayoutName(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return "contiguous";
    case Layout::kZigzag:
      return "zigzag";
    case Layout::kStriped:
      return "striped";
    case Layout::kZigzagPerDocument:
      return "zigzag_per_document";
  }
  assert(false && "unknown Layout");
  return "";
}

int64_t RowsIn(const Shard& shard) {
  int64_t rows = 0;
  for (const Span& span : shard) rows += span.length;
  return rows;
}

namespace {

// Returns the token of a chosen row's query on its packed or batch row's axis.
int64_t TokenOf(const AttentionShape& shape, const ProbabilityRow& row) {
  return (shape.packed ? shape.cu_seqlens_q[row.batch] : 0) + row.position;
}

// Assigns each chosen row to the owner of its query.
std::vector<Shard> ChosenShards(const AttentionSpec& spec, const ShardPlan& plan) {
  std::vector<Shard> chosen(plan.world_size);
  if (spec.probability_rows.empty()) return chosen;
  const ShardMap queries({1, spec.shape.seq_len_q, 1, Axis::kQ}, plan.q);
  int last = kNoRank;
  for (size_t i = 0; i < spec.probability_rows.size(); ++i) {
    const int rank = queries.RunAt(TokenOf(spec.shape, spec.probability_rows[i]), 1).rank;
    if (rank == last) {
      ++chosen[rank].back().length;
    } else {
      chosen[rank].push_back({static_cast<int64_t>(i), 1, 1});
    }
    last = rank;
  }
  return chosen;
}

}  // namespace

std::vector<ChosenRow> ChosenRowsOf(const AttentionSpec& spec, const ShardPlan& plan, int rank) {
  const ShardMap queries({1, spec.shape.seq_len_q, 1, Axis::kQ}, plan.q);
  std::vector<ChosenRow> rows;
  for (const Span& span : plan.chosen[rank]) {
    for (int64_t i = span.begin; i < span.begin + span.length; ++i) {
      const ProbabilityRow& row = spec.probability_rows[i];
      rows.push_back({spec.shape.packed ? 0 : row.batch,
                      queries.RunAt(TokenOf(spec.shape, row), 1).local_offset});
    }
  }
  return rows;
}

TensorLayout LayoutOf(const AttentionSpec& spec, const ShardPlan& plan, TensorId id) {
  const TensorLayout layout = LayoutOf(spec, id);
  const bool by_keys = InfoOf(id).form == TensorForm::kPairs && ShardsPairsByKeys(plan);
  return by_keys ? CutByKeys(layout, PairColumns(spec.shape)) : layout;
}

ShardPlan MakeShardPlan(const AttentionSpec& spec, Layout layout, int world_size, int64_t stripe) {
  assert(world_size >= 1 && stripe >= 1);
  ShardPlan plan;
  plan.layout = layout;
  plan.world_size = world_size;
  plan.stripe = stripe;
  if (layout == Layout::kZigzagPerDocument && spec.shape.num_documents() > 1) {
    plan.q.resize(world_size);
    plan.kv.resize(world_size);
    for (const Unit& unit : Units(spec.shape, world_size)) {
      for (int rank = 0; rank < world_size; ++rank) {
        AppendZigzag(plan.q[rank], unit.q_begin, unit.q_end, world_size, rank);
        AppendZigzag(plan.kv[rank], unit.kv_begin, unit.kv_end, world_size, rank);
      }
    }
    plan.chosen = ChosenShards(spec, plan);
    return plan;
  }
  for (int rank = 0; rank < world_size; ++rank) {
    plan.q.push_back(MakeShard(spec.shape.seq_len_q, layout, world_size, stripe, rank));
    plan.kv.push_back(MakeShard(spec.shape.seq_len_kv, layout, world_size, stripe, rank));
  }
  plan.chosen = ChosenShards(spec, plan);
  return plan;
}

std::vector<Piece> CutIntoPieces(const Shard& shard, const std::vector<int64_t>& cu_seqlens) {
  std::vector<Piece> pieces;
  int64_t local_begin = 0;
  int64_t document = -1;
  for (const Span& span : shard) {
    for (int64_t done = 0; done < span.length;) {
      const int64_t token = span.begin + done * span.stride;
      // The document of a token is the last one that begins at or before it; this also skips empty
      // documents. Tokens ascend, so only the first one needs a search.
      if (document < 0) {
        const auto next = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), token);
        document = next - cu_seqlens.begin() - 1;
      }
      assert(document >= 0 && cu_seqlens[document] <= token && token < cu_seqlens.back());
      while (cu_seqlens[document + 1] <= token) ++document;
      const int64_t next_begin = cu_seqlens[document + 1];
      const int64_t length =
          std::min(span.length - done, (next_begin - token - 1) / span.stride + 1);
      pieces.push_back({local_begin, length, document, token - cu_seqlens[document], span.stride});
      local_begin += length;
      done += length;
    }
  }
  return pieces;
}

namespace {

std::vector<Piece> Placed(std::vector<Piece> pieces, const std::vector<DocumentPosition>& places) {
  if (places.empty()) return pieces;
  for (Piece& piece : pieces) {
    const DocumentPosition& place = places[piece.document];
    piece.position = place.first + place.step * piece.position;
    piece.stride *= place.step;
  }
  return pieces;
}

}  // namespace

std::vector<Piece> QueryPieces(const AttentionShape& shape, const Shard& shard) {
  return Placed(CutIntoPieces(shard, shape.cu_seqlens_q), shape.places);
}

std::vector<Piece> KeyPieces(const AttentionShape& shape, const Shard& shard) {
  return Placed(CutIntoPieces(shard, shape.cu_seqlens_k), shape.places);
}

std::vector<Piece> SlicePieces(const std::vector<Piece>& pieces, int64_t begin, int64_t end) {
  std::vector<Piece> slice;
  auto piece = std::partition_point(pieces.begin(), pieces.end(), [&](const Piece& p) {
    return p.local_begin + p.length <= begin;
  });
  for (; piece != pieces.end() && piece->local_begin < end; ++piece) {
    const int64_t skipped = std::max<int64_t>(0, begin - piece->local_begin);
    const int64_t length = std::min(piece->length, end - piece->local_begin) - skipped;
    if (length <= 0) continue;
    slice.push_back({piece->local_begin + skipped - begin, length, piece->document,
                     piece->PositionOf(skipped), piece->stride});
  }
  return slice;
}

std::vector<Shard> ShardsOf(const ShardPlan& plan, const TensorLayout& layout) {
  const Shard all = layout.rows == 0 ? Shard{} : Shard{{0, layout.rows, 1}};
  switch (layout.axis) {
    case Axis::kQ:
      return plan.q;
    case Axis::kKv:
      return plan.kv;
    case Axis::kReplicated:
      return std::vector<Shard>(plan.world_size, all);
    case Axis::kRankZero: {
      std::vector<Shard> shards(plan.world_size);
      shards[0] = all;
      return shards;
    }
    case Axis::kChosenRows:
      return plan.chosen;
  }
  return {};
}

int64_t ShardRows(const ShardPlan& plan, const TensorLayout& layout, int rank) {
  switch (layout.axis) {
    case Axis::kQ:
      return RowsIn(plan.q[rank]);
    case Axis::kKv:
      return RowsIn(plan.kv[rank]);
    case Axis::kReplicated:
      return layout.rows;
    case Axis::kRankZero:
      return rank == 0 ? layout.rows : 0;
    case Axis::kChosenRows:
      return RowsIn(plan.chosen[rank]);
  }
  return 0;
}

std::string ToString(const ShardPlan& plan) {
  std::string text = absl::StrCat("layout ", LayoutName(plan.layout), ", ", plan.world_size,
                                  plan.world_size == 1 ? " rank" : " ranks");
  if (plan.layout == Layout::kStriped) absl::StrAppend(&text, ", stripe ", plan.stripe);
  absl::StrAppend(&text, "\n");
  for (int rank = 0; rank < plan.world_size; ++rank) {
    absl::StrAppendFormat(&text, "  rank %d  q %d rows %s  kv %d rows %s\n", rank,
                          RowsIn(plan.q[rank]), ToString(plan.q[rank]), RowsIn(plan.kv[rank]),
                          ToString(plan.kv[rank]));
  }
  return text;
}

}  // namespace ringattn

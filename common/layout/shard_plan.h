// ShardPlan: which rank owns which tokens. Placement never changes the result;
// a layout only balances work and exchange.
//
//   contiguous  rank r owns slice r of W
//   zigzag      2W slices; rank r owns slices r and 2W - 1 - r
//   zigzag per document
//               the same for every long packed document by itself, and for every run of
//               short ones between (kLongDocument); without documents, zigzag
//   striped     blocks of `stripe` tokens dealt out in turn; stripe 1 gives rank
//               r the positions r, r + W, r + 2W, ...
//
// q is cut along its own token axis, k and v along theirs (packed inputs along
// the packed axis). Slices differ by at most one token and may be empty, so any
// length works with any ring size. Every batch row is cut alike.
#ifndef RINGATTN_COMMON_LAYOUT_SHARD_PLAN_H_
#define RINGATTN_COMMON_LAYOUT_SHARD_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/attention/band.h"
#include "common/attention/tensors.h"

namespace ringattn {

enum class Layout : uint8_t {
  kContiguous = 0,
  kZigzag = 1,
  kStriped = 2,
  kZigzagPerDocument = 3,
};

// A document is long from this many tokens per slice on, on either axis: shorter slices would
// leave tiles half empty. From 1/kMaxUnits of all tokens on, if that is more: a shard
// has at most 4 kMaxUnits spans.
inline constexpr int64_t kLongDocumentSlice = 128;
inline constexpr int64_t kMaxUnits = 2048;
const char* LayoutName(Layout layout);

// Tokens begin, begin + stride, ..., `length` of them, in global token indices.
struct Span {
  int64_t begin = 0;
  int64_t length = 0;
  int64_t stride = 1;

  bool operator==(const Span&) const = default;
};

// The tokens of one rank on one axis, in the order of its local rows, which is the
// tensor's order (so that shards can be streamed). Spans are non-empty and disjoint.
using Shard = std::vector<Span>;

int64_t RowsIn(const Shard& shard);

struct ShardPlan {
  Layout layout = Layout::kContiguous;
  int world_size = 1;
  int64_t stripe = 1;     // striped only
  std::vector<Shard> q;   // [world_size]
  std::vector<Shard> kv;  // [world_size]
  // Of the spec's probability_rows, by their number: where their queries are. [world_size]
  std::vector<Shard> chosen;
};

// REQUIRES: world_size >= 1, stripe >= 1.
ShardPlan MakeShardPlan(const AttentionSpec& spec, Layout layout, int world_size,
                        int64_t stripe = 1);

// The rows of every rank of a tensor.
std::vector<Shard> ShardsOf(const ShardPlan& plan, const TensorLayout& layout);
// The chosen rows of a rank as it has them, in the order of plan.chosen.
std::vector<ChosenRow> ChosenRowsOf(const AttentionSpec& spec, const ShardPlan& plan, int rank);

// How many they are of one rank.
int64_t ShardRows(const ShardPlan& plan, const TensorLayout& layout, int rank);

// Cuts a shard at document boundaries. Pieces are in local row order, non-empty,
// and cover every row exactly once.
std::vector<Piece> CutIntoPieces(const Shard& shard, const std::vector<int64_t>& cu_seqlens);

// The pieces of a shard of q's tokens, or of k's and v's, at the positions that they have in the
// documents of the whole problem (AttentionShape::places).
std::vector<Piece> QueryPieces(const AttentionShape& shape, const Shard& shard);
std::vector<Piece> KeyPieces(const AttentionShape& shape, const Shard& shard);

// The pieces of rows [begin, end) of a local buffer, with local_begin counted
// from `begin`: what a buffer that holds only those rows contains.
std::vector<Piece> SlicePieces(const std::vector<Piece>& pieces, int64_t begin, int64_t end);

// --- Bytes: from a global tensor to shards and back -------------------------

// Instead of a rank: bytes that no rank has (tensor_route.h).
inline constexpr int kNoRank = -1;

// A run of bytes that is contiguous both in the global tensor and in one rank's
// local tensor ([outer, local rows, inner_bytes]).
struct ByteRun {
  int rank = 0;
  int64_t global_offset = 0;
  int64_t local_offset = 0;
  int64_t bytes = 0;
  size_t part = 0;  // which of a packed tensor's local tensors (tensor_route.h)
};

// Appends a run, joined to the one before where both sides continue it.
void AppendRun(std::vector<ByteRun>& runs, const ByteRun& run);

// Maps byte ranges of one tensor between its global form and its shards.
// Immutable, cheap to copy, thread safe.
class ShardMap {
 public:
  // REQUIRES: the shards cover the axis, each token once, or each of them all of it where the
  // layout's axis is kReplicated; they are made of spans of stride 1 or, as striped ones, of spans
  // of one stride that begin below it.
  ShardMap(const TensorLayout& layout, const std::vector<Shard>& shards);
  ShardMap(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor);

  // Every rank's local tensor is the global one.
  bool replicated() const { return layout_.axis == Axis::kReplicated; }

  // Runs that cover [offset, offset + bytes) of the global tensor, ascending, as
  // few as there are: one per span touched and outer index, one per token where the
  // stride is not 1. O(runs log spans).
  // REQUIRES: the range lies inside the tensor; not replicated().
  std::vector<ByteRun> FromGlobal(int64_t offset, int64_t bytes) const;

  // Runs that cover [offset, offset + bytes) of `rank`'s local tensor, ascending.
  std::vector<ByteRun> FromLocal(int rank, int64_t offset, int64_t bytes) const;

  // The first of the runs that FromGlobal would give.
  // REQUIRES: bytes > 0; the range lies inside the tensor; not replicated().
  ByteRun RunAt(int64_t offset, int64_t bytes) const;

  int64_t local_bytes(int rank) const;
  int64_t local_rows(int rank) const { return rows_[rank]; }
  // Local rows of the rank that stand for tokens before `token`.
  int64_t LocalRowsBefore(int rank, int64_t token) const;
  int64_t global_bytes() const { return layout_.bytes(); }
  const TensorLayout& layout() const { return layout_; }

 private:
  struct OwnedSpan {
    int rank;
    int64_t local_begin;
    Span span;
  };

  const OwnedSpan& OwnerOf(int64_t token) const;

  TensorLayout layout_;
  std::vector<std::vector<OwnedSpan>> by_rank_;
  std::vector<OwnedSpan> by_token_;  // ascending begin
  std::vector<int64_t> rows_;        // per rank
  int64_t period_ = 1;               // the stride that all spans have
};

std::string ToString(const ShardPlan& plan);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LAYOUT_SHARD_PLAN_H_

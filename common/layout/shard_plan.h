// ShardPlan: which rank owns which tokens. Placement never changes the result; a layout only
// balances work and exchange. W is the ring size.
//
//   contiguous  rank r owns slice r of W
//   zigzag      2W slices; rank r owns slices r and 2W - 1 - r
//   zigzag per document
//               zigzag applied separately to every long packed document and to every run of
//               short ones between them (kLongDocument); without documents, zigzag
//   striped     blocks of `stripe` tokens dealt out in turn; stripe 1 gives rank
//               r the positions r, r + W, r + 2W, ...
//
// q is sharded along its own token axis, k and v along theirs (packed inputs along the packed
// axis). Slices differ by at most one token and may be empty, so any length works with any ring
// size. All batch rows are sharded alike.
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

// A document is long from this many tokens per slice on, on either axis; shorter slices would leave
// tiles half empty. It must also have at least 1/kMaxUnits of all tokens, so that a shard has at
// most 4 kMaxUnits spans.
inline constexpr int64_t kLongDocumentSlice = 128;
inline constexpr int64_t kMaxUnits = 2048;
const char* LayoutName(Layout layout);

// `length` tokens begin, begin + stride, ..., in global token indices.
struct Span {
  int64_t begin = 0;
  int64_t length = 0;
  int64_t stride = 1;

  bool operator==(const Span&) const = default;
};

// The tokens of one rank on one axis, in the order of its local rows. This is the tensor's order,
// so shards can be streamed. Spans are non-empty and disjoint.
using Shard = std::vector<Span>;

int64_t RowsIn(const Shard& shard);

struct ShardPlan {
  Layout layout = Layout::kContiguous;
  int world_size = 1;
  int64_t stripe = 1;     // striped only
  std::vector<Shard> q;   // [world_size]
  std::vector<Shard> kv;  // [world_size]
  // Indices into the spec's probability_rows, by the owner of their queries. [world_size]
  std::vector<Shard> chosen;
  // The axis of a bias, its gradient and a mask: kQ (each rank has the rows of its queries) or kKv
  // (each rank has the columns of its keys, for all queries).
  Axis pair_axis = Axis::kQ;
};

// Returns whether pair_axis is kKv.
inline bool ShardsPairsByKeys(const ShardPlan& plan) { return plan.pair_axis == Axis::kKv; }

// Returns the layout that workers hold under the plan: that of LayoutOf(spec, id), except that a
// tensor of form kPairs follows pair_axis.
TensorLayout LayoutOf(const AttentionSpec& spec, const ShardPlan& plan, TensorId id);

// Returns the shards of a layout, with pair_axis kQ. REQUIRES: world_size >= 1, stripe >= 1.
ShardPlan MakeShardPlan(const AttentionSpec& spec, Layout layout, int world_size,
                        int64_t stripe = 1);

// Returns the rows of every rank of a tensor.
std::vector<Shard> ShardsOf(const ShardPlan& plan, const TensorLayout& layout);
// Returns a rank's chosen rows as local rows, in the order of plan.chosen.
std::vector<ChosenRow> ChosenRowsOf(const AttentionSpec& spec, const ShardPlan& plan, int rank);

// Returns how many rows one rank has.
int64_t ShardRows(const ShardPlan& plan, const TensorLayout& layout, int rank);

// Divides a shard at document boundaries. Pieces are in local row order, non-empty, and cover every
// row exactly once.
std::vector<Piece> CutIntoPieces(const Shard& shard, const std::vector<int64_t>& cu_seqlens);

// Returns the pieces of a shard of q's tokens, or of k's and v's. Their positions are those in the
// documents of the whole problem (AttentionShape::places).
std::vector<Piece> QueryPieces(const AttentionShape& shape, const Shard& shard);
std::vector<Piece> KeyPieces(const AttentionShape& shape, const Shard& shard);

// Returns the pieces of rows [begin, end) of a local buffer, with local_begin counted from `begin`:
// the pieces of a buffer that holds only those rows.
std::vector<Piece> SlicePieces(const std::vector<Piece>& pieces, int64_t begin, int64_t end);

// --- Bytes: from a global tensor to shards and back -------------------------

// In place of a rank: bytes that no rank has (tensor_route.h).
inline constexpr int kNoRank = -1;

// A run of bytes that is contiguous both in the global tensor and in one rank's local tensor
// ([outer, local rows, inner_bytes]).
struct ByteRun {
  int rank = 0;
  int64_t global_offset = 0;
  int64_t local_offset = 0;
  int64_t bytes = 0;
  size_t part = 0;  // index of the local tensor of a packed tensor (tensor_route.h)
};

// Appends a run. Joins it to the previous run if it continues that run on both sides.
void AppendRun(std::vector<ByteRun>& runs, const ByteRun& run);

// Maps byte ranges between the global form of one tensor and its shards. Immutable, cheap to copy,
// thread safe.
class ShardMap {
 public:
  // REQUIRES: the shards cover every token of the axis once, or all of it on each rank if the
  // layout's axis is kReplicated. Their spans have stride 1 or, as striped shards do, one common
  // stride and begin below it.
  ShardMap(const TensorLayout& layout, const std::vector<Shard>& shards);
  ShardMap(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor);

  // Whether every rank's local tensor is the global one.
  bool replicated() const { return layout_.axis == Axis::kReplicated; }

  // Returns the runs that cover [offset, offset + bytes) of the global tensor, ascending and as few
  // as possible: one per touched span and outer index, or one per token if the stride is not 1.
  // O(runs log spans).
  // REQUIRES: the range lies inside the tensor; not replicated().
  std::vector<ByteRun> FromGlobal(int64_t offset, int64_t bytes) const;

  // Returns the runs that cover [offset, offset + bytes) of `rank`'s local tensor, ascending.
  std::vector<ByteRun> FromLocal(int rank, int64_t offset, int64_t bytes) const;

  // Returns the first run that FromGlobal would return.
  // REQUIRES: bytes > 0; the range lies inside the tensor; not replicated().
  ByteRun RunAt(int64_t offset, int64_t bytes) const;

  int64_t local_bytes(int rank) const;
  int64_t local_rows(int rank) const { return rows_[rank]; }
  // Returns how many of the rank's local rows hold tokens before `token`.
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
  int64_t period_ = 1;               // the common stride of all spans
};

std::string ToString(const ShardPlan& plan);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LAYOUT_SHARD_PLAN_H_

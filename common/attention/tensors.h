// The tensors of a request, in one table. Validation, schedules, admission, the edge, the client,
// the command line's files and the oracle all read this table. Shapes: AttentionShape
// (attention_spec.h).
//
// Pure functions of their arguments; thread safe.
#ifndef RINGATTN_COMMON_ATTENTION_TENSORS_H_
#define RINGATTN_COMMON_ATTENTION_TENSORS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/attention/attention_spec.h"
#include "common/attention/dtype.h"

namespace ringattn {

// Which ranks hold which rows of a tensor.
enum class Axis : uint8_t {
  // Sharded along q's tokens (ShardPlan::q). For kPairs unless ShardPlan::pair_axis is kKv.
  kQ,
  kKv,          // sharded along k/v's tokens (ShardPlan::kv)
  kReplicated,  // every rank holds all of it
  kRankZero,    // rank 0 holds all of it
  kChosenRows,  // sharded along the chosen rows (ShardPlan::chosen)
};

// The role of a tensor in one direction.
enum class TensorUse : uint8_t {
  kNone,
  kInput,
  kForwardResult,  // an input of backward, unless backward recomputes it
  kOutput,
};

// How the shape determines the tensor's axes.
enum class TensorForm : uint8_t {
  kRows,        // [batch, tokens, heads, dim]
  kPackedRows,  // [batch, tokens, parts, heads, dim]
  kStatistics,  // [batch, heads, tokens]
  kPerHead,     // [heads]
  kPairs,       // [batch or 1, heads or 1, queries, PairColumns]
  kPerToken,    // [batch, tokens]
  kChosenRows,  // [rows, heads, ProbabilityColumns]
};
enum class HeadsOf : uint8_t { kQuery, kKeyValue };
enum class DimOf : uint8_t { kNone, kKey, kValue };
enum class ElementOf : uint8_t { kRequest, kResult, kFloat32, kBias, kMask, kInt32 };

struct TensorInfo {
  TensorId id;
  const char* name;  // name in files, messages and JSON
  Axis axis;
  TensorForm form;
  HeadsOf heads;
  DimOf dim;
  ElementOf element;
  TensorUse forward;
  TensorUse backward;
  std::optional<TensorId> gradient_of;
  // Returns whether a request has the tensor; null: every request has it.
  bool (*is_present)(const AttentionSpec&) = nullptr;
  // For a packed tensor: the tensors that are the parts of a token, in their order. Clients and the
  // service exchange the packed tensor in place of its parts; workers hold the parts.
  absl::Span<const TensorId> parts = {};
};

// Returns every tensor, in the order of ids.
absl::Span<const TensorInfo> AllTensors();
const TensorInfo& InfoOf(TensorId id);
const char* TensorName(TensorId id);  // "q", "k", ...
std::optional<TensorId> TensorFromName(absl::string_view name);
// Looks up a tensor by its number in a chunk.
std::optional<TensorId> TensorFromNumber(int number);

// Returns the tensors that a request sends and receives, in the order in which they are streamed.
std::vector<TensorId> InputsOf(const AttentionSpec& spec, Direction direction,
                               bool recompute_forward);
// Returns whether the client still sends this input of a backward that reads a residual.
bool IsSentBesideResidual(TensorId id);
std::vector<TensorId> OutputsOf(const AttentionSpec& spec, Direction direction);

// The same lists as workers hold them: with the parts instead of packed tensors.
std::vector<TensorId> ShardInputsOf(const AttentionSpec& spec, Direction direction,
                                    bool recompute_forward);
std::vector<TensorId> ShardOutputsOf(const AttentionSpec& spec, Direction direction);
// Returns the client's tensor that holds the worker's tensor `id`: `id` itself, or the packed
// tensor.
TensorId ClientTensorOf(const AttentionSpec& spec, TensorId id);
// Returns the workers' tensors of a client's tensor: `id` itself, or the parts of a packed tensor.
std::vector<TensorId> PartsOf(TensorId id);

// Returns the shape that a client sees, e.g. {batch, num_heads, seq_len_q} for lse, or {documents,
// num_heads, LongestQueries} for lse per document.
std::vector<int64_t> DimensionsOf(const AttentionSpec& spec, TensorId id);
// Returns the queries of the longest document.
int64_t LongestQueries(const AttentionShape& shape);
// Returns the keys of the longest document among those of the spec's probability_rows.
int64_t ProbabilityColumns(const AttentionSpec& spec);
// Returns whether clients hold the tensor per document. Workers never do.
bool IsPerDocument(const AttentionSpec& spec, TensorId id);
// Returns the element type: fp32 for statistics, the bias's dtype for a bias, else the dtype of the
// spec or of its results. REQUIRES: HasDType.
DType DTypeOf(const AttentionSpec& spec, TensorId id);
// Returns false for a mask and for ids.
bool HasDType(TensorId id);

// Upper bound of all sizes. A product of legal dimensions may exceed int64 (pairs of a long
// sequence with itself, for every head of every batch row), so sizes saturate here. The sum of four
// such sizes fits int64.
inline constexpr int64_t kSaturatedBytes = int64_t{1} << 60;
// Returns the product, at most kSaturatedBytes. REQUIRES: no factor is negative.
int64_t SaturatingProduct(std::initializer_list<int64_t> factors);

// Memory layout of a tensor as [outer, rows, inner_bytes], where `rows` is the axis that is
// sharded:
//   kRows         batch, tokens, bytes of a token
//   kStatistics   batch * heads, tokens, 4
//   kPerHead      1, heads, 4; not sharded
//   kPairs        (batch or 1) * (heads or 1), queries, bytes of a row
//   kPairs by keys (CutByKeys)  (batch or 1) * (heads or 1) * queries, keys, bytes of an element
//   kPerToken     batch, tokens, 4
//   kChosenRows   1, rows, bytes of a row
struct TensorLayout {
  int64_t outer = 0;
  int64_t rows = 0;
  int64_t inner_bytes = 0;
  Axis axis = Axis::kQ;

  int64_t bytes() const { return SaturatingProduct({outer, rows, inner_bytes}); }
  // Returns the bytes of a shard with `shard_rows` of the rows.
  int64_t ShardBytes(int64_t shard_rows) const {
    return SaturatingProduct({outer, shard_rows, inner_bytes});
  }
};
// Returns the layout of the same bytes sharded along the keys, given the `layout` sharded along the
// queries. The tensor has form kPairs and `keys` columns; no byte holds several columns.
TensorLayout CutByKeys(const TensorLayout& layout, int64_t keys);
// Returns the layout that workers hold: the flat one for a tensor per document. A tensor of form
// kPairs is sharded along the queries; a ShardPlan may shard it along the keys (shard_plan.h).
TensorLayout LayoutOf(const AttentionSpec& spec, TensorId id);

// Returns the bytes of the whole tensor as a client holds it. Saturates.
int64_t BytesOf(const AttentionSpec& spec, TensorId id);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_TENSORS_H_

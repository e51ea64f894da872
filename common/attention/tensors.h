// The tensors of a request: one table that validation, the schedule, admission, the
// edge, the client, the files of the command line and the oracle ask. A tensor that is
// not in it does not exist.
// Shapes: AttentionShape (attention_spec.h).
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
  // Cut along q's tokens, as ShardPlan::q says: for kPairs unless AttentionSpec::pairs_by_keys.
  kQ,
  kKv,          // cut along k/v's tokens, as ShardPlan::kv says
  kReplicated,  // every rank holds all of it
  kRankZero,    // rank 0 holds all of it
  kChosenRows,  // cut along the chosen rows, as ShardPlan::chosen says
};

// What a tensor is to a direction.
enum class TensorUse : uint8_t {
  kNone,
  kInput,
  kForwardResult,  // an input of backward, unless backward computes it again
  kOutput,
};

// How a tensor's axes follow from the shape.
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
  const char* name;  // in files, messages and JSON
  Axis axis;
  TensorForm form;
  HeadsOf heads;
  DimOf dim;
  ElementOf element;
  TensorUse forward;
  TensorUse backward;
  std::optional<TensorId> gradient_of;
  // Which requests have it; null: all.
  bool (*is_present)(const AttentionSpec&) = nullptr;
  // Of a packed tensor: which the parts of a token are, in their order. Such a tensor travels
  // between clients and the service in place of its parts; workers have the parts.
  absl::Span<const TensorId> parts = {};
};

// Every tensor, in the order of their ids.
absl::Span<const TensorInfo> AllTensors();
const TensorInfo& InfoOf(TensorId id);
const char* TensorName(TensorId id);  // "q", "k", ...
std::optional<TensorId> TensorFromName(absl::string_view name);
// By number, as chunks carry it.
std::optional<TensorId> TensorFromNumber(int number);

// The tensors that a request sends and gets, in the order in which they are streamed.
std::vector<TensorId> InputsOf(const AttentionSpec& spec, Direction direction,
                               bool recompute_forward);
// Of the inputs of a backward that reads a residual: those that its client still sends.
bool IsSentBesideResidual(TensorId id);
std::vector<TensorId> OutputsOf(const AttentionSpec& spec, Direction direction);

// The same as workers have them: the parts of packed tensors.
std::vector<TensorId> ShardInputsOf(const AttentionSpec& spec, Direction direction,
                                    bool recompute_forward);
std::vector<TensorId> ShardOutputsOf(const AttentionSpec& spec, Direction direction);
// The tensor in which a client has what workers have as `id`: itself, or the packed one.
TensorId ClientTensorOf(const AttentionSpec& spec, TensorId id);
// What workers have a client's tensor as: itself, or the parts of a packed one.
std::vector<TensorId> PartsOf(TensorId id);

// The shape that a client sees, e.g. {batch, num_heads, seq_len_q} for lse, or
// {documents, num_heads, LongestQueries} where it is per document.
std::vector<int64_t> DimensionsOf(const AttentionSpec& spec, TensorId id);
// Queries of the longest document.
int64_t LongestQueries(const AttentionShape& shape);
// Keys of the longest document among those of the spec's probability_rows.
int64_t ProbabilityColumns(const AttentionSpec& spec);
// Whether a client has the tensor per document, which no worker does.
bool IsPerDocument(const AttentionSpec& spec, TensorId id);
// The element type: fp32 for statistics, the bias's for a bias, the spec's dtype or its results'
// otherwise. REQUIRES: HasDType.
DType DTypeOf(const AttentionSpec& spec, TensorId id);
// False for a mask and ids.
bool HasDType(TensorId id);

// No size is larger: a product of legal dimensions may exceed int64 (pairs of a long
// sequence with itself, for every head of every batch row), so sizes stop here. Four
// such sizes can be added.
inline constexpr int64_t kSaturatedBytes = int64_t{1} << 60;
// The product, at most kSaturatedBytes. REQUIRES: no factor is negative.
int64_t SaturatingProduct(std::initializer_list<int64_t> factors);

// How a tensor lies in memory, seen as [outer, rows, inner_bytes] bytes where `rows` is
// the axis that is cut into shards: batch, tokens and a token's bytes for kRows; batch *
// heads, tokens and 4 for kStatistics; 1, heads and 4 for kPerHead, which is not cut; batch or 1
// times heads or 1, queries and a row's bytes for kPairs, or, cut by keys (pairs_by_keys), that
// times queries, keys and an element's bytes; batch, tokens and 4 for kPerToken; 1, rows and a
// row's bytes for kChosenRows.
struct TensorLayout {
  int64_t outer = 0;
  int64_t rows = 0;
  int64_t inner_bytes = 0;
  Axis axis = Axis::kQ;

  int64_t bytes() const { return SaturatingProduct({outer, rows, inner_bytes}); }
  // Of a shard with `shard_rows` of the rows.
  int64_t ShardBytes(int64_t shard_rows) const {
    return SaturatingProduct({outer, shard_rows, inner_bytes});
  }
};
// Of a tensor of form kPairs with `keys` columns, none of them several to a byte: the same bytes,
// cut along the keys (AttentionSpec::pairs_by_keys) where `layout` has them cut along the queries.
TensorLayout CutByKeys(const TensorLayout& layout, int64_t keys);
// As workers have it: of a tensor per document, the flat one.
TensorLayout LayoutOf(const AttentionSpec& spec, TensorId id);

// Bytes of the whole tensor as a client has it; saturates.
int64_t BytesOf(const AttentionSpec& spec, TensorId id);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_TENSORS_H_

#include "common/attention/tensors.h"

#include <algorithm>
#include <cassert>

namespace ringattn {
namespace {

using Use = TensorUse;

constexpr TensorInfo Rows(TensorId id, const char* name, Axis axis, DimOf dim, Use forward,
                          Use backward, std::optional<TensorId> gradient_of = std::nullopt) {
  const HeadsOf heads = axis == Axis::kKv ? HeadsOf::kKeyValue : HeadsOf::kQuery;
  const bool is_result = forward == Use::kOutput || backward == Use::kOutput;
  const ElementOf element = is_result ? ElementOf::kResult : ElementOf::kRequest;
  return {id, name, axis, TensorForm::kRows, heads, dim, element, forward, backward, gradient_of};
}

using IsPresent = bool (*)(const AttentionSpec&);

// A tensor in fp32 with query heads.
constexpr TensorInfo Floats(TensorId id, const char* name, TensorForm form, Axis axis, Use forward,
                            Use backward, std::optional<TensorId> gradient_of = std::nullopt,
                            IsPresent is_present = nullptr) {
  return {
      id,      name,     axis,        form,      HeadsOf::kQuery, DimOf::kNone, ElementOf::kFloat32,
      forward, backward, gradient_of, is_present};
}

bool HasDlse(const AttentionSpec& spec) { return spec.has_dlse; }
bool HasSinks(const AttentionSpec& spec) { return spec.options.sinks; }
bool HasBias(const AttentionSpec& spec) { return spec.options.bias.has_value(); }
bool HasBiasGradient(const AttentionSpec& spec) {
  return spec.options.bias.has_value() && spec.options.bias->gradient;
}
bool HasMask(const AttentionSpec& spec) { return spec.options.mask.has_value(); }
bool HasSegmentIds(const AttentionSpec& spec) { return spec.options.segment_ids; }
bool HasQkv(const AttentionSpec& spec) { return spec.shape.packing == Packing::kQkv; }
bool HasProbabilities(const AttentionSpec& spec) { return !spec.probability_rows.empty(); }
bool HasKv(const AttentionSpec& spec) { return spec.shape.packing == Packing::kKv; }

// A bias or a mask, sharded by query rows.
constexpr TensorInfo Pairs(TensorId id, const char* name, ElementOf element, Use forward,
                           Use backward, std::optional<TensorId> gradient_of,
                           IsPresent is_present) {
  return {id,      name,    Axis::kQ, TensorForm::kPairs, HeadsOf::kQuery, DimOf::kNone,
          element, forward, backward, gradient_of,        is_present};
}

constexpr TensorInfo Ids(TensorId id, const char* name, Axis axis) {
  return {id,
          name,
          axis,
          TensorForm::kPerToken,
          HeadsOf::kQuery,
          DimOf::kNone,
          ElementOf::kInt32,
          Use::kInput,
          Use::kInput,
          std::nullopt,
          HasSegmentIds};
}

constexpr TensorId kQkvParts[] = {TensorId::kQ, TensorId::kK, TensorId::kV};
constexpr TensorId kKvParts[] = {TensorId::kK, TensorId::kV};
constexpr TensorId kDqkvParts[] = {TensorId::kDq, TensorId::kDk, TensorId::kDv};
constexpr TensorId kDkvParts[] = {TensorId::kDk, TensorId::kDv};

constexpr TensorInfo Packed(TensorId id, const char* name, Axis axis, ElementOf element,
                            Use forward, Use backward, std::optional<TensorId> gradient_of,
                            IsPresent is_present, absl::Span<const TensorId> parts) {
  const HeadsOf heads = axis == Axis::kKv ? HeadsOf::kKeyValue : HeadsOf::kQuery;
  return {id,       name,        axis,       TensorForm::kPackedRows,
          heads,    DimOf::kKey, element,    forward,
          backward, gradient_of, is_present, parts};
}

constexpr TensorInfo kTensors[] = {
    Rows(TensorId::kQ, "q", Axis::kQ, DimOf::kKey, Use::kInput, Use::kInput),
    Rows(TensorId::kK, "k", Axis::kKv, DimOf::kKey, Use::kInput, Use::kInput),
    Rows(TensorId::kV, "v", Axis::kKv, DimOf::kValue, Use::kInput, Use::kInput),
    Rows(TensorId::kOut, "out", Axis::kQ, DimOf::kValue, Use::kOutput, Use::kForwardResult),
    Floats(TensorId::kLse, "lse", TensorForm::kStatistics, Axis::kQ, Use::kOutput,
           Use::kForwardResult),
    Rows(TensorId::kDout, "dout", Axis::kQ, DimOf::kValue, Use::kNone, Use::kInput, TensorId::kOut),
    Rows(TensorId::kDq, "dq", Axis::kQ, DimOf::kKey, Use::kNone, Use::kOutput, TensorId::kQ),
    Rows(TensorId::kDk, "dk", Axis::kKv, DimOf::kKey, Use::kNone, Use::kOutput, TensorId::kK),
    Rows(TensorId::kDv, "dv", Axis::kKv, DimOf::kValue, Use::kNone, Use::kOutput, TensorId::kV),
    Floats(TensorId::kDlse, "dlse", TensorForm::kStatistics, Axis::kQ, Use::kNone, Use::kInput,
           TensorId::kLse, HasDlse),
    Floats(TensorId::kSinks, "sinks", TensorForm::kPerHead, Axis::kReplicated, Use::kInput,
           Use::kInput, std::nullopt, HasSinks),
    Floats(TensorId::kDsinks, "dsinks", TensorForm::kPerHead, Axis::kRankZero, Use::kNone,
           Use::kOutput, TensorId::kSinks, HasSinks),
    Pairs(TensorId::kBias, "bias", ElementOf::kBias, Use::kInput, Use::kInput, std::nullopt,
          HasBias),
    Pairs(TensorId::kDbias, "dbias", ElementOf::kBias, Use::kNone, Use::kOutput, TensorId::kBias,
          HasBiasGradient),
    Pairs(TensorId::kMask, "mask", ElementOf::kMask, Use::kInput, Use::kInput, std::nullopt,
          HasMask),
    Ids(TensorId::kQSegmentIds, "q_segment_ids", Axis::kQ),
    Ids(TensorId::kKvSegmentIds, "kv_segment_ids", Axis::kKv),
    Packed(TensorId::kQkv, "qkv", Axis::kQ, ElementOf::kRequest, Use::kInput, Use::kInput,
           std::nullopt, HasQkv, kQkvParts),
    Packed(TensorId::kKv, "kv", Axis::kKv, ElementOf::kRequest, Use::kInput, Use::kInput,
           std::nullopt, HasKv, kKvParts),
    Packed(TensorId::kDqkv, "dqkv", Axis::kQ, ElementOf::kResult, Use::kNone, Use::kOutput,
           TensorId::kQkv, HasQkv, kDqkvParts),
    Packed(TensorId::kDkv, "dkv", Axis::kKv, ElementOf::kResult, Use::kNone, Use::kOutput,
           TensorId::kKv, HasKv, kDkvParts),
    Floats(TensorId::kProbabilities, "probabilities", TensorForm::kChosenRows, Axis::kChosenRows,
           Use::kOutput, Use::kNone, std::nullopt, HasProbabilities),
};

constexpr bool IdsAscend() {
  for (size_t i = 0; i < std::size(kTensors); ++i) {
    if (static_cast<size_t>(kTensors[i].id) != i + 1) return false;
  }
  return true;
}
static_assert(IdsAscend(), "ids count from 1 and the table is in their order");

Use UseIn(const TensorInfo& info, const AttentionSpec& spec, Direction direction) {
  if (info.is_present != nullptr && !info.is_present(spec)) return Use::kNone;
  return direction == Direction::kForward ? info.forward : info.backward;
}

int64_t TokensOf(const AttentionShape& shape, const TensorInfo& info) {
  return info.axis == Axis::kKv ? shape.seq_len_kv : shape.seq_len_q;
}

int64_t HeadCountOf(const AttentionShape& shape, const TensorInfo& info) {
  return info.heads == HeadsOf::kKeyValue ? shape.num_kv_heads : shape.num_heads;
}

// Returns the number of batch planes (of_batch) or head planes of a bias or a mask.
int64_t PairPlanes(const AttentionSpec& spec, const TensorInfo& info, bool of_batch) {
  const bool is_mask = info.element == ElementOf::kMask;
  const BiasForm bias = spec.options.bias.value_or(BiasForm());
  const MaskForm mask = spec.options.mask.value_or(MaskForm());
  if (of_batch) return (is_mask ? mask.per_batch : bias.per_batch) ? spec.shape.batch : 1;
  return (is_mask ? mask.per_head : bias.per_head) ? spec.shape.num_heads : 1;
}

// Returns the elements of a row; for a mask, its bytes.
int64_t PairRowElements(const AttentionSpec& spec, const TensorInfo& info) {
  const int64_t columns = PairColumns(spec.shape);
  const bool bits =
      info.element == ElementOf::kMask && spec.options.mask.has_value() && spec.options.mask->bits;
  return bits ? columns / 8 + (columns % 8 != 0 ? 1 : 0) : columns;
}

int64_t ElementBytesOf(const AttentionSpec& spec, const TensorInfo& info) {
  if (info.element == ElementOf::kMask) return 1;
  if (info.element == ElementOf::kInt32) return 4;
  return ElementBytes(DTypeOf(spec, info.id));
}

int64_t DimCountOf(const AttentionShape& shape, const TensorInfo& info) {
  return info.dim == DimOf::kValue ? shape.head_dim_v : shape.head_dim;
}

// Which side a list of tensors is for.
enum class Side { kClient, kWorker };

template <typename Wanted>
std::vector<TensorId> TensorsIn(const AttentionSpec& spec, Side side, const Wanted& wanted) {
  std::vector<TensorId> tensors;
  for (const TensorInfo& info : kTensors) {
    const bool theirs =
        side == Side::kClient ? ClientTensorOf(spec, info.id) == info.id : info.parts.empty();
    if (theirs && wanted(info)) tensors.push_back(info.id);
  }
  return tensors;
}

bool IsInput(Use use, bool recompute_forward) {
  return use == Use::kInput || (use == Use::kForwardResult && !recompute_forward);
}

}  // namespace

absl::Span<const TensorInfo> AllTensors() { return kTensors; }

const TensorInfo& InfoOf(TensorId id) {
  const auto index = static_cast<size_t>(id) - 1;
  assert(index < std::size(kTensors));
  return kTensors[index];
}

const char* TensorName(TensorId id) { return InfoOf(id).name; }

std::optional<TensorId> TensorFromName(absl::string_view name) {
  for (const TensorInfo& info : kTensors) {
    if (info.name == name) return info.id;
  }
  return std::nullopt;
}

std::optional<TensorId> TensorFromNumber(int number) {
  if (number < 1 || number > static_cast<int>(std::size(kTensors))) return std::nullopt;
  return static_cast<TensorId>(number);
}

std::vector<TensorId> InputsOf(const AttentionSpec& spec, Direction direction,
                               bool recompute_forward) {
  return TensorsIn(spec, Side::kClient, [&](const TensorInfo& info) {
    return IsInput(UseIn(info, spec, direction), recompute_forward);
  });
}

std::vector<TensorId> ShardInputsOf(const AttentionSpec& spec, Direction direction,
                                    bool recompute_forward) {
  return TensorsIn(spec, Side::kWorker, [&](const TensorInfo& info) {
    return IsInput(UseIn(info, spec, direction), recompute_forward);
  });
}

TensorId ClientTensorOf(const AttentionSpec& spec, TensorId id) {
  if (spec.shape.packing == Packing::kNone) return id;
  for (const TensorInfo& info : kTensors) {
    if (info.parts.empty() || !info.is_present(spec)) continue;
    if (std::find(info.parts.begin(), info.parts.end(), id) != info.parts.end()) return info.id;
  }
  return id;
}

std::vector<TensorId> PartsOf(TensorId id) {
  const absl::Span<const TensorId> parts = InfoOf(id).parts;
  if (parts.empty()) return {id};
  return {parts.begin(), parts.end()};
}

bool IsSentBesideResidual(TensorId id) { return id == TensorId::kDout || id == TensorId::kDlse; }

std::vector<TensorId> OutputsOf(const AttentionSpec& spec, Direction direction) {
  return TensorsIn(spec, Side::kClient, [&](const TensorInfo& info) {
    return UseIn(info, spec, direction) == Use::kOutput;
  });
}

std::vector<TensorId> ShardOutputsOf(const AttentionSpec& spec, Direction direction) {
  return TensorsIn(spec, Side::kWorker, [&](const TensorInfo& info) {
    return UseIn(info, spec, direction) == Use::kOutput;
  });
}

int64_t LongestQueries(const AttentionShape& shape) {
  int64_t longest = 0;
  for (size_t d = 1; d < shape.cu_seqlens_q.size(); ++d) {
    longest = std::max(longest, shape.cu_seqlens_q[d] - shape.cu_seqlens_q[d - 1]);
  }
  return longest;
}

int64_t ProbabilityColumns(const AttentionSpec& spec) {
  const AttentionShape& shape = spec.shape;
  if (!shape.packed) return shape.seq_len_kv;
  int64_t longest = 0;
  for (const ProbabilityRow& row : spec.probability_rows) {
    longest = std::max(longest, shape.cu_seqlens_k[row.batch + 1] - shape.cu_seqlens_k[row.batch]);
  }
  return longest;
}

bool IsPerDocument(const AttentionSpec& spec, TensorId id) {
  return spec.lse_per_document && InfoOf(id).form == TensorForm::kStatistics;
}

std::vector<int64_t> DimensionsOf(const AttentionSpec& spec, TensorId id) {
  const AttentionShape& shape = spec.shape;
  const TensorInfo& info = InfoOf(id);
  if (info.form == TensorForm::kPerHead) return {HeadCountOf(shape, info)};
  if (info.form == TensorForm::kPairs) {
    return {PairPlanes(spec, info, true), PairPlanes(spec, info, false), TokensOf(shape, info),
            PairRowElements(spec, info)};
  }
  if (info.form == TensorForm::kChosenRows) {
    return {static_cast<int64_t>(spec.probability_rows.size()), HeadCountOf(shape, info),
            ProbabilityColumns(spec)};
  }
  if (IsPerDocument(spec, id)) {
    return {shape.num_documents(), HeadCountOf(shape, info), LongestQueries(shape)};
  }
  std::vector<int64_t> dimensions;
  if (!shape.packed) dimensions.push_back(shape.batch);
  if (info.form == TensorForm::kPerToken) {
    dimensions.push_back(TokensOf(shape, info));
  } else if (info.form == TensorForm::kStatistics) {
    dimensions.insert(dimensions.end(), {HeadCountOf(shape, info), TokensOf(shape, info)});
  } else {
    dimensions.push_back(TokensOf(shape, info));
    if (!info.parts.empty()) dimensions.push_back(static_cast<int64_t>(info.parts.size()));
    dimensions.insert(dimensions.end(), {HeadCountOf(shape, info), DimCountOf(shape, info)});
  }
  return dimensions;
}

DType DTypeOf(const AttentionSpec& spec, TensorId id) {
  assert(HasDType(id));
  switch (InfoOf(id).element) {
    case ElementOf::kRequest:
      return spec.dtype;
    case ElementOf::kResult:
      return spec.result_dtype();
    case ElementOf::kBias:
      return spec.options.bias.value_or(BiasForm()).float32 ? DType::kFloat32 : spec.dtype;
    case ElementOf::kFloat32:
    case ElementOf::kMask:
    case ElementOf::kInt32:
      break;
  }
  return DType::kFloat32;
}

bool HasDType(TensorId id) {
  const ElementOf element = InfoOf(id).element;
  return element != ElementOf::kMask && element != ElementOf::kInt32;
}

int64_t SaturatingProduct(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  bool saturated = false;
  for (int64_t factor : factors) {
    assert(factor >= 0);
    if (factor == 0) return 0;
    saturated =
        saturated || __builtin_mul_overflow(product, factor, &product) || product > kSaturatedBytes;
    if (saturated) product = 1;  // a later factor 0 still gives 0
  }
  return saturated ? kSaturatedBytes : product;
}

TensorLayout CutByKeys(const TensorLayout& layout, int64_t keys) {
  if (keys == 0) return {SaturatingProduct({layout.outer, layout.rows}), 0, 0, Axis::kKv};
  return {SaturatingProduct({layout.outer, layout.rows}), keys, layout.inner_bytes / keys,
          Axis::kKv};
}

TensorLayout LayoutOf(const AttentionSpec& spec, TensorId id) {
  const AttentionShape& shape = spec.shape;
  const TensorInfo& info = InfoOf(id);
  const int64_t element_bytes = ElementBytesOf(spec, info);
  TensorLayout layout;
  layout.axis = info.axis;
  if (info.form == TensorForm::kPerHead) {
    layout.outer = 1;
    layout.rows = HeadCountOf(shape, info);
    layout.inner_bytes = element_bytes;
    return layout;
  }
  if (info.form == TensorForm::kChosenRows) {
    layout.outer = 1;
    layout.rows = static_cast<int64_t>(spec.probability_rows.size());
    layout.inner_bytes =
        SaturatingProduct({HeadCountOf(shape, info), ProbabilityColumns(spec), element_bytes});
    return layout;
  }
  layout.rows = TokensOf(shape, info);
  if (info.form == TensorForm::kPairs) {
    layout.outer = PairPlanes(spec, info, true) * PairPlanes(spec, info, false);
    layout.inner_bytes = SaturatingProduct({PairRowElements(spec, info), element_bytes});
    return layout;
  }
  if (info.form == TensorForm::kPerToken) {
    layout.outer = shape.batch;
    layout.inner_bytes = element_bytes;
    return layout;
  }
  if (info.form == TensorForm::kStatistics) {
    layout.outer = SaturatingProduct({shape.batch, HeadCountOf(shape, info)});
    layout.inner_bytes = element_bytes;
  } else {
    const int64_t parts = std::max<int64_t>(static_cast<int64_t>(info.parts.size()), 1);
    layout.outer = shape.batch;
    layout.inner_bytes = SaturatingProduct(
        {parts, HeadCountOf(shape, info), DimCountOf(shape, info), element_bytes});
  }
  return layout;
}

int64_t BytesOf(const AttentionSpec& spec, TensorId id) {
  if (!IsPerDocument(spec, id)) return LayoutOf(spec, id).bytes();
  const AttentionShape& shape = spec.shape;
  return SaturatingProduct({shape.num_documents(), HeadCountOf(shape, InfoOf(id)),
                            LongestQueries(shape), ElementBytesOf(spec, InfoOf(id))});
}

}  // namespace ringattn

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

// In fp32, of query heads.
constexpr TensorInfo Floats(TensorId id, const char* name, TensorForm form, Axis axis, Use forward,
                            Use backward, std::optional<TensorId> gradient_of = std::nullopt,
                            IsPresent is_present = nullptr) {
  return {
      id,      name,     axis,        form,      HeadsOf::kQuery, DimOf::kNone, ElementOf::kFloat32,
      forward, backward, gradient_of, is_present};
}

bool HasDlse(const AttentionSpec& spec) { return spec.has_dlse; }
bool HasSinks(const AttentionSpec& spec) { return spec.options.sinks; }

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

int64_t DimCountOf(const AttentionShape& shape, const TensorInfo& info) {
  return info.dim == DimOf::kValue ? shape.head_dim_v : shape.head_dim;
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
  std::vector<TensorId> inputs;
  for (const TensorInfo& info : kTensors) {
    const Use use = UseIn(info, spec, direction);
    if (use == Use::kInput || (use == Use::kForwardResult && !recompute_forward)) {
      inputs.push_back(info.id);
    }
  }
  return inputs;
}

std::vector<TensorId> OutputsOf(const AttentionSpec& spec, Direction direction) {
  std::vector<TensorId> outputs;
  for (const TensorInfo& info : kTensors) {
    if (UseIn(info, spec, direction) == Use::kOutput) outputs.push_back(info.id);
  }
  return outputs;
}

std::vector<int64_t> DimensionsOf(const AttentionSpec& spec, TensorId id) {
  const AttentionShape& shape = spec.shape;
  const TensorInfo& info = InfoOf(id);
  if (info.form == TensorForm::kPerHead) return {HeadCountOf(shape, info)};
  std::vector<int64_t> dimensions;
  if (!shape.packed) dimensions.push_back(shape.batch);
  if (info.form == TensorForm::kStatistics) {
    dimensions.insert(dimensions.end(), {HeadCountOf(shape, info), TokensOf(shape, info)});
  } else {
    dimensions.insert(dimensions.end(),
                      {TokensOf(shape, info), HeadCountOf(shape, info), DimCountOf(shape, info)});
  }
  return dimensions;
}

DType DTypeOf(const AttentionSpec& spec, TensorId id) {
  switch (InfoOf(id).element) {
    case ElementOf::kRequest:
      return spec.dtype;
    case ElementOf::kResult:
      return spec.result_dtype();
    case ElementOf::kFloat32:
      break;
  }
  return DType::kFloat32;
}

int64_t SaturatingProduct(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  bool saturated = false;
  for (int64_t factor : factors) {
    assert(factor >= 0);
    if (factor == 0) return 0;
    saturated =
        saturated || __builtin_mul_overflow(product, factor, &product) || product > kSaturatedBytes;
    if (saturated) product = 1;  // a later 0 still makes it 0
  }
  return saturated ? kSaturatedBytes : product;
}

TensorLayout LayoutOf(const AttentionSpec& spec, TensorId id) {
  const AttentionShape& shape = spec.shape;
  const TensorInfo& info = InfoOf(id);
  const int64_t element_bytes = ElementBytes(DTypeOf(spec, id));
  TensorLayout layout;
  layout.axis = info.axis;
  if (info.form == TensorForm::kPerHead) {
    layout.outer = 1;
    layout.rows = HeadCountOf(shape, info);
    layout.inner_bytes = element_bytes;
    return layout;
  }
  layout.rows = TokensOf(shape, info);
  if (info.form == TensorForm::kStatistics) {
    layout.outer = SaturatingProduct({shape.batch, HeadCountOf(shape, info)});
    layout.inner_bytes = element_bytes;
  } else {
    layout.outer = shape.batch;
    layout.inner_bytes =
        SaturatingProduct({HeadCountOf(shape, info), DimCountOf(shape, info), element_bytes});
  }
  return layout;
}

int64_t BytesOf(const AttentionSpec& spec, TensorId id) { return LayoutOf(spec, id).bytes(); }

}  // namespace ringattn

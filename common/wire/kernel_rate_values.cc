#include "common/wire/kernel_rate_values.h"

#include <cmath>
#include <optional>
#include <utility>

#include "common/wire/proto_values.h"

namespace ringattn {

v1::KernelRate ToProto(const KernelRate& rate) {
  v1::KernelRate proto;
  proto.set_family(rate.family);
  for (const DType dtype : rate.dtypes) proto.add_dtypes(ToProto(dtype));
  proto.set_backward(rate.direction == Direction::kBackward);
  proto.set_score_terms(rate.kind.score_terms);
  if (rate.kind.deterministic) proto.set_deterministic(*rate.kind.deterministic);
  if (rate.kind.softcap) proto.set_softcap(*rate.kind.softcap);
  proto.set_min_head_dim(static_cast<uint32_t>(rate.kind.min_head_dim));
  proto.set_max_head_dim(static_cast<uint32_t>(rate.kind.max_head_dim));
  proto.set_head_dim_multiple(static_cast<uint32_t>(rate.kind.head_dim_multiple));
  proto.set_flops_per_second(rate.flops_per_second);
  return proto;
}

std::vector<KernelRate> KernelRatesOf(
    const google::protobuf::RepeatedPtrField<v1::KernelRate>& protos) {
  std::vector<KernelRate> rates;
  for (const v1::KernelRate& proto : protos) {
    if (!std::isfinite(proto.flops_per_second()) || proto.flops_per_second() <= 0) continue;
    KernelRate rate;
    rate.family = proto.family();
    for (int i = 0; i < proto.dtypes_size(); ++i) {
      const std::optional<DType> dtype = FromProto(proto.dtypes(i));
      if (dtype.has_value()) rate.dtypes.push_back(*dtype);
    }
    rate.direction = proto.backward() ? Direction::kBackward : Direction::kForward;
    RequestKind& kind = rate.kind;
    kind.score_terms = proto.score_terms();
    if (proto.has_deterministic()) kind.deterministic = proto.deterministic();
    if (proto.has_softcap()) kind.softcap = proto.softcap();
    if (proto.min_head_dim() > 0) kind.min_head_dim = proto.min_head_dim();
    if (proto.max_head_dim() > 0) kind.max_head_dim = proto.max_head_dim();
    if (proto.head_dim_multiple() > 0) kind.head_dim_multiple = proto.head_dim_multiple();
    rate.flops_per_second = proto.flops_per_second();
    rates.push_back(std::move(rate));
  }
  return rates;
}

}  // namespace ringattn

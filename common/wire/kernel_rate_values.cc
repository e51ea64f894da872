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
  proto.set_score_terms(rate.score_terms);
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
    rate.score_terms = proto.score_terms();
    rate.flops_per_second = proto.flops_per_second();
    rates.push_back(std::move(rate));
  }
  return rates;
}

}  // namespace ringattn

// Converts between KernelRate and its message. Pure.
#ifndef RINGATTN_COMMON_WIRE_KERNEL_RATE_VALUES_H_
#define RINGATTN_COMMON_WIRE_KERNEL_RATE_VALUES_H_

#include <vector>

#include "common/plan/kernel_rate.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn {

v1::KernelRate ToProto(const KernelRate& rate);

// Returns the rates that a worker registered, without invalid ones (not finite, or not above 0) and
// without dtypes that DType does not have.
std::vector<KernelRate> KernelRatesOf(
    const google::protobuf::RepeatedPtrField<v1::KernelRate>& protos);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_WIRE_KERNEL_RATE_VALUES_H_

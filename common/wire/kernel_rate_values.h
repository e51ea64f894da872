// KernelRate and the message that stands for it. Pure.
#ifndef RINGATTN_COMMON_WIRE_KERNEL_RATE_VALUES_H_
#define RINGATTN_COMMON_WIRE_KERNEL_RATE_VALUES_H_

#include <vector>

#include "common/plan/kernel_rate.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn {

v1::KernelRate ToProto(const KernelRate& rate);

// What a worker registered, without what is no rate (not finite, not above 0). Dtypes that have
// no value here are left out.
std::vector<KernelRate> KernelRatesOf(
    const google::protobuf::RepeatedPtrField<v1::KernelRate>& protos);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_WIRE_KERNEL_RATE_VALUES_H_

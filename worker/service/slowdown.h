// By how much an operation takes longer than the rates of its kind of request say. Pure.
#ifndef RINGATTN_WORKER_SERVICE_SLOWDOWN_H_
#define RINGATTN_WORKER_SERVICE_SLOWDOWN_H_

#include <string_view>
#include <vector>

#include "common/plan/kernel_rate.h"
#include "worker/executor/operation.h"

namespace ringattn::worker {

// Of a call that `family` serves, of a request that `rates` may give another family: at least 1.
// Of several rates of the family, the slowest one's.
double SlowdownOfCall(const AttentionSpec& spec, Direction direction, std::string_view family,
                      const std::vector<KernelRate>& rates);

// The largest among an operation's attention calls (v1::Reserved.slowdown). REQUIRES: allocated.
double SlowdownOf(const Operation& operation, const std::vector<KernelRate>& rates);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_SLOWDOWN_H_

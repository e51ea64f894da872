// Computes how much slower an operation is than the rates of its kind of request predict. Pure
// functions.
#ifndef RINGATTN_WORKER_SERVICE_SLOWDOWN_H_
#define RINGATTN_WORKER_SERVICE_SLOWDOWN_H_

#include <string_view>
#include <vector>

#include "common/plan/kernel_rate.h"
#include "worker/executor/operation.h"

namespace ringattn::worker {

// Returns the slowdown, at least 1, of a call that `family` serves, for a request for which `rates`
// may predict another family. If the family has several rates, the slowest counts.
double SlowdownOfCall(const AttentionSpec& spec, Direction direction, std::string_view family,
                      const std::vector<KernelRate>& rates);

// Returns the largest slowdown among an operation's attention calls (v1::Reserved.slowdown).
// REQUIRES: allocated.
double SlowdownOf(const Operation& operation, const std::vector<KernelRate>& rates);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_SLOWDOWN_H_

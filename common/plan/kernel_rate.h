// How fast a device's kernels are: one rate per family, for requests are served by one or the
// other, and they differ by more than a factor of ten. Pure.
#ifndef RINGATTN_COMMON_PLAN_KERNEL_RATE_H_
#define RINGATTN_COMMON_PLAN_KERNEL_RATE_H_

#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/plan/schedule.h"

namespace ringattn {

// Floating point operations per second of the kernels that a device chooses for calls of these
// dtypes and this direction.
struct KernelRate {
  std::string family;
  std::vector<DType> dtypes;
  Direction direction = Direction::kForward;
  double flops_per_second = 0;  // > 0
  // Of requests with a bias, a mask, ids, ALiBi or dropout, and of deterministic backwards, which
  // the same kernels serve; or of others.
  bool score_terms = false;
};

// The rate of the kernels that serve a request: the first of `rates` with its dtype and direction,
// for score terms or without; null if there is none. The device says what its own choice is, so
// both agree.
const KernelRate* RateOf(const std::vector<KernelRate>& rates, const AttentionSpec& spec,
                         Direction direction);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_KERNEL_RATE_H_

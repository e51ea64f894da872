// The speed of a device's kernels, one rate per kind of request: different kinds use different
// kernel families, whose rates differ by more than a factor of ten. Pure.
#ifndef RINGATTN_COMMON_PLAN_KERNEL_RATE_H_
#define RINGATTN_COMMON_PLAN_KERNEL_RATE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/schedule/schedule.h"

namespace ringattn {

// The properties by which a device chooses kernels, for requests of one dtype and direction.
struct RequestKind {
  bool score_terms = false;  // whether the request has a bias, a mask, ids, ALiBi or dropout
  std::optional<bool> deterministic;  // backward only; unset: either
  std::optional<bool> softcap;        // unset: either
  // Bounds of the larger of head_dim and head_dim_v, and a common divisor of both.
  int64_t min_head_dim = 1;
  int64_t max_head_dim = kMaxHeadDim;
  int64_t head_dim_multiple = 1;

  // Returns whether the larger head dimension is within the bounds and both are multiples of
  // head_dim_multiple.
  bool Covers(int64_t head_dim, int64_t head_dim_v) const;
  bool operator==(const RequestKind&) const = default;
};

// Floating point operations per second of the kernels that a device chooses for requests of these
// dtypes, this direction and this kind.
struct KernelRate {
  std::string family;
  std::vector<DType> dtypes;
  Direction direction = Direction::kForward;
  double flops_per_second = 0;  // > 0
  RequestKind kind;
};

// Returns the rate of the kernels that serve a request: among the `rates` that match its dtype,
// direction and kind, the first of those with the largest head_dim_multiple; null if none matches.
// The device reports its own choice, so both agree. (A call may still use slower kernels, depending
// on its pieces: v1::Reserved.slowdown.)
const KernelRate* RateOf(const std::vector<KernelRate>& rates, const AttentionSpec& spec,
                         Direction direction);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_KERNEL_RATE_H_

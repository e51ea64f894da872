// How fast a device's kernels are: a rate for each kind of request, for they are served by one
// family of kernels or the other, which differ by more than a factor of ten. Pure.
#ifndef RINGATTN_COMMON_PLAN_KERNEL_RATE_H_
#define RINGATTN_COMMON_PLAN_KERNEL_RATE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/schedule/schedule.h"

namespace ringattn {

// Which requests of a dtype and direction kernels are chosen for: what the choice goes by.
struct RequestKind {
  bool score_terms = false;           // with a bias, a mask, ids, ALiBi or dropout; or without
  std::optional<bool> deterministic;  // of a backward; unset: either
  std::optional<bool> softcap;        // unset: either
  // Of head_dim and head_dim_v: the larger one's bounds, and what both are multiples of.
  int64_t min_head_dim = 1;
  int64_t max_head_dim = 256;
  int64_t head_dim_multiple = 1;

  // Of the head dims: whether the larger is within the bounds, and both are multiples.
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

// The rate of the kernels that serve a request: of `rates` with its dtype and direction whose kind
// is the request's, the first of those with the largest head_dim_multiple; null if there is none.
// The device says what its own choice is, so both agree. (A call may still fall to slower kernels,
// by how its pieces lie: v1::Reserved.slowdown.)
const KernelRate* RateOf(const std::vector<KernelRate>& rates, const AttentionSpec& spec,
                         Direction direction);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_KERNEL_RATE_H_

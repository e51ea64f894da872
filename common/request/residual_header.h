// The header of a Backward that reads a residual: what it leaves out is its Forward's, and what
// it says must be the same.
#ifndef RINGATTN_COMMON_REQUEST_RESIDUAL_HEADER_H_
#define RINGATTN_COMMON_REQUEST_RESIDUAL_HEADER_H_

#include <optional>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/base/limits.h"
#include "common/plan/planner.h"
#include "common/request/violations.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn {

// Fills in shape, dtype, options, plan and reply.output_dtype. INVALID_ARGUMENT, by field, for
// what is set and differs; a message that is set is compared as a whole, defaults resolved. Pure.
//   forward  the Forward's request
//   plan     what became of its plan options: nothing left to choose
//   members  the workers that have it, by ring rank
std::optional<Rejection> FillFromResidual(const AttentionSpec& forward, const PlanChoice& plan,
                                          const std::vector<std::string>& members,
                                          const Limits& limits, v1::BackwardHeader* header);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_RESIDUAL_HEADER_H_

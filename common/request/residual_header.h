// Completes the header of a Backward that reads a residual. Fields that it omits come from its
// Forward; fields that it sets must equal the Forward's.
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

// Fills in shape, dtype, options, plan and reply.output_dtype. Returns INVALID_ARGUMENT, by field,
// for each field that is set and differs. Compares a set message as a whole, with defaults
// resolved. Pure.
//   forward  the Forward's request
//   plan     its plan options, all resolved
//   members  the workers that hold the residual, by ring rank
std::optional<Rejection> FillFromResidual(const AttentionSpec& forward, const PlanChoice& plan,
                                          const std::vector<std::string>& members,
                                          const Limits& limits, v1::BackwardHeader* header);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_RESIDUAL_HEADER_H_

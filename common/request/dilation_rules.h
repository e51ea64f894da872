// What dilated levels do not go with, and how many there may be.
#ifndef RINGATTN_COMMON_REQUEST_DILATION_RULES_H_
#define RINGATTN_COMMON_REQUEST_DILATION_RULES_H_

#include "common/attention/attention_spec.h"
#include "common/base/limits.h"
#include "common/plan/planner.h"
#include "common/request/violations.h"

namespace ringattn {

// REQUIRES: the shape is right, or `violations` has why it is not.
void CheckDilation(const PlanChoice& choice, const AttentionSpec& spec, const Limits& limits,
                   Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_DILATION_RULES_H_

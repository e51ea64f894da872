// Limits of dilated levels, and the options that they exclude.
#ifndef RINGATTN_COMMON_REQUEST_DILATION_RULES_H_
#define RINGATTN_COMMON_REQUEST_DILATION_RULES_H_

#include "common/attention/attention_spec.h"
#include "common/base/limits.h"
#include "common/request/violations.h"

namespace ringattn {

// REQUIRES: the shape is valid, or `violations` says why it is not.
void CheckDilation(int64_t heads_per_step, const AttentionSpec& spec, const Limits& limits,
                   Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_DILATION_RULES_H_

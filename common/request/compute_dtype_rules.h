// Which other options a request with options.compute_dtype may have.
#ifndef RINGATTN_COMMON_REQUEST_COMPUTE_DTYPE_RULES_H_
#define RINGATTN_COMMON_REQUEST_COMPUTE_DTYPE_RULES_H_

#include "common/attention/attention_spec.h"
#include "common/request/violations.h"

namespace ringattn {

// Largest head_dim and head_dim_v of products in e4m3. Both must be multiples of 8.
inline constexpr int64_t kMaxFloat8HeadDim = 128;

//   retains  the request keeps a residual
void CheckComputeDType(const AttentionSpec& spec, Direction direction, bool retains,
                       Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_COMPUTE_DTYPE_RULES_H_

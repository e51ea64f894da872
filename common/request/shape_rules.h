// The rules for a request's shape. Pure.
#ifndef RINGATTN_COMMON_REQUEST_SHAPE_RULES_H_
#define RINGATTN_COMMON_REQUEST_SHAPE_RULES_H_

#include "common/attention/attention_spec.h"
#include "common/base/limits.h"
#include "common/request/violations.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn {

// Reads a shape and resolves defaults. Replaces each invalid size by a valid one, so that later
// checks stay bounded.
AttentionShape CheckShape(const v1::AttentionShape& proto, const Limits& limits,
                          Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_SHAPE_RULES_H_

// From a header's messages to the RawRequest that ValidateRequest judges. Pure.
#ifndef RINGATTN_COMMON_WIRE_RAW_REQUEST_H_
#define RINGATTN_COMMON_WIRE_RAW_REQUEST_H_

#include "common/request/validation.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn {

// Unchecked: any value is taken as it is. Fields that are unset, and enums that are no
// value, stay unset.
void ReadShape(const v1::AttentionShape& shape, RawRequest* raw);
void ReadOptions(const v1::AttentionOptions& options, RawRequest* raw);
void ReadPlan(const v1::PlanOptions& plan, RawRequest* raw);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_WIRE_RAW_REQUEST_H_

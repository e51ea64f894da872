// Fields that the protocol does not have: rejected, since what is ignored may have been
// meant.
#ifndef RINGATTN_COMMON_REQUEST_UNKNOWN_FIELDS_H_
#define RINGATTN_COMMON_REQUEST_UNKNOWN_FIELDS_H_

#include <google/protobuf/message.h>

#include <string>

#include "common/request/violations.h"

namespace ringattn {

// Adds a violation for the first unknown fields of `message` and what it holds, each named
// by its path behind `prefix` and its number.
void FindUnknownFields(const google::protobuf::Message& message, const std::string& prefix,
                       Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_UNKNOWN_FIELDS_H_

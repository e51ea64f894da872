// Rejects fields that this version of the protocol does not have. Ignoring them could change the
// meaning of a request.
#ifndef RINGATTN_COMMON_REQUEST_UNKNOWN_FIELDS_H_
#define RINGATTN_COMMON_REQUEST_UNKNOWN_FIELDS_H_

#include <google/protobuf/message.h>

#include <string>

#include "common/request/violations.h"

namespace ringattn {

// Adds a violation for each of the first unknown fields in `message` and its submessages. Names a
// field by its path after `prefix` and its number.
void FindUnknownFields(const google::protobuf::Message& message, const std::string& prefix,
                       Violations& violations);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_REQUEST_UNKNOWN_FIELDS_H_

// Protobuf's own JSON, for answers that are shown as they are.
#ifndef RINGATTN_CLIENT_CLI_PROTO_JSON_H_
#define RINGATTN_CLIENT_CLI_PROTO_JSON_H_

#include "client/cli/command.h"
#include "google/protobuf/message.h"

namespace ringattn::client::cli {

// Field names as in the .proto, fields with default values included unless told otherwise;
// 64-bit integers are strings, as protobuf's JSON has them.
Json ProtoJson(const google::protobuf::Message& message, bool with_defaults = true);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_PROTO_JSON_H_

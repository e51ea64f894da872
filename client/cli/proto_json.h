// Protobuf's own JSON, for answers that are printed unchanged.
#ifndef RINGATTN_CLIENT_CLI_PROTO_JSON_H_
#define RINGATTN_CLIENT_CLI_PROTO_JSON_H_

#include "client/cli/command.h"
#include "google/protobuf/message.h"

namespace ringattn::client::cli {

// Field names are those of the .proto. Fields with default values are included unless
// `with_defaults` is false. 64-bit integers are strings, as protobuf's JSON defines.
Json ProtoJson(const google::protobuf::Message& message, bool with_defaults = true);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_PROTO_JSON_H_

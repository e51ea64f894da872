// The cluster's shared secret: what workers and operators show on the control
// listener, and what the coordinator shows to workers.
#ifndef RINGATTN_SERVER_EDGE_SECRET_H_
#define RINGATTN_SERVER_EDGE_SECRET_H_

#include <string>

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ringattn {

inline constexpr char kSecretMetadataKey[] = "ringattn-secret";

// The file's text without the white space around it. INVALID_ARGUMENT if it cannot
// be read, is shorter than 16 characters, longer than 1,024, or holds what HTTP
// metadata cannot carry.
absl::StatusOr<std::string> ReadSecretFile(const std::string& path);

// Compares in a time that depends on the lengths only.
bool EqualSecrets(absl::string_view a, absl::string_view b);

// OK, or UNAUTHENTICATED if the call does not carry the secret exactly once.
grpc::Status CheckSecret(const grpc::ServerContextBase& context, absl::string_view secret);

}  // namespace ringattn

#endif  // RINGATTN_SERVER_EDGE_SECRET_H_

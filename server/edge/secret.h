// The cluster's shared secret: what workers and operators show on the control
// listener, and what the coordinator shows to workers.
#ifndef RINGATTN_SERVER_EDGE_SECRET_H_
#define RINGATTN_SERVER_EDGE_SECRET_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/strings/string_view.h"

namespace ringattn::server {

inline constexpr char kSecretMetadataKey[] = "ringattn-secret";

// Compares in a time that depends on the lengths only.
bool EqualSecrets(absl::string_view a, absl::string_view b);

// OK, or UNAUTHENTICATED if the call does not carry the secret exactly once.
grpc::Status CheckSecret(const grpc::ServerContextBase& context, absl::string_view secret);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SECRET_H_

// The cluster's shared secret on a call: what workers and operators show on the control
// listener, and what the coordinator shows to workers.
#ifndef RINGATTN_COMMON_SECURITY_SECRET_H_
#define RINGATTN_COMMON_SECURITY_SECRET_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/strings/string_view.h"

namespace ringattn {

inline constexpr char kSecretMetadataKey[] = "ringattn-secret";

// The project's one comparison of secrets. Both sides are hashed (SHA-256) and the digests
// compared by OpenSSL's CRYPTO_memcmp, so the time tells neither where they differ nor, but
// for a block of the hash per 64 bytes, whether their lengths agree.
bool SecretsEqual(absl::string_view a, absl::string_view b);

// OK, or UNAUTHENTICATED if the call does not carry the secret exactly once.
grpc::Status CheckSecret(const grpc::ServerContextBase& context, absl::string_view secret);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_SECRET_H_

// The cluster's shared secret in a call's metadata. Workers and operators send it to the control
// listener; the coordinator sends it to workers.
#ifndef RINGATTN_COMMON_SECURITY_SECRET_H_
#define RINGATTN_COMMON_SECURITY_SECRET_H_

#include <array>
#include <optional>
#include <string>

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/strings/string_view.h"

namespace ringattn {

inline constexpr char kSecretMetadataKey[] = "ringattn-secret";

// SHA-256 of a secret. Safe to store if the secret was drawn at random.
class SecretDigest {
 public:
  static SecretDigest Of(absl::string_view secret);
  // Accepts 64 hexadecimal digits; returns nullopt for any other text.
  static std::optional<SecretDigest> FromHex(absl::string_view text);
  std::string ToHex() const;

  // All comparisons of secrets use this operator, based on OpenSSL's CRYPTO_memcmp: its time does
  // not depend on where they differ.
  friend bool operator==(const SecretDigest& a, const SecretDigest& b);

 private:
  std::array<unsigned char, 32> bytes_;
};

// Compares by digests, so the time does not depend on where they differ, and on their lengths only
// by one hash block per 64 bytes.
bool SecretsEqual(absl::string_view a, absl::string_view b);

// Returns OK, or UNAUTHENTICATED if the call does not have the secret exactly once.
grpc::Status CheckSecret(const grpc::ServerContextBase& context, absl::string_view secret);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_SECRET_H_

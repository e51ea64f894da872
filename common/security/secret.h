// The cluster's shared secret on a call: what workers and operators show on the control
// listener, and what the coordinator shows to workers.
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

// SHA-256 of a secret: what may be written down of it, if it was drawn at random.
class SecretDigest {
 public:
  static SecretDigest Of(absl::string_view secret);
  // 64 hexadecimal digits; nothing for any other text.
  static std::optional<SecretDigest> FromHex(absl::string_view text);
  std::string ToHex() const;

  // The project's one comparison of secrets, by OpenSSL's CRYPTO_memcmp: the time does not
  // tell where they differ.
  friend bool operator==(const SecretDigest& a, const SecretDigest& b);

 private:
  std::array<unsigned char, 32> bytes_;
};

// By their digests, so that the time tells neither where they differ nor, but for a block of
// the hash per 64 bytes, whether their lengths agree.
bool SecretsEqual(absl::string_view a, absl::string_view b);

// OK, or UNAUTHENTICATED if the call does not carry the secret exactly once.
grpc::Status CheckSecret(const grpc::ServerContextBase& context, absl::string_view secret);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_SECRET_H_

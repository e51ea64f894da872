#include "common/security/secret.h"

#include <algorithm>
#include <iterator>

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace ringattn {

SecretDigest SecretDigest::Of(absl::string_view secret) {
  SecretDigest digest;
  static_assert(sizeof(digest.bytes_) == SHA256_DIGEST_LENGTH);
  SHA256(reinterpret_cast<const unsigned char*>(secret.data()), secret.size(),
         digest.bytes_.data());
  return digest;
}

std::optional<SecretDigest> SecretDigest::FromHex(absl::string_view text) {
  SecretDigest digest;
  const bool is_hex = text.size() == 2 * digest.bytes_.size() &&
                      std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
  if (!is_hex) return std::nullopt;
  const std::string bytes = absl::HexStringToBytes(text);
  std::copy(bytes.begin(), bytes.end(), digest.bytes_.begin());
  return digest;
}

std::string SecretDigest::ToHex() const {
  return absl::BytesToHexString({reinterpret_cast<const char*>(bytes_.data()), bytes_.size()});
}

bool operator==(const SecretDigest& a, const SecretDigest& b) {
  return CRYPTO_memcmp(a.bytes_.data(), b.bytes_.data(), a.bytes_.size()) == 0;
}

bool SecretsEqual(absl::string_view a, absl::string_view b) {
  return SecretDigest::Of(a) == SecretDigest::Of(b);
}

grpc::Status CheckSecret(const grpc::ServerContextBase& context, absl::string_view secret) {
  const auto& metadata = context.client_metadata();
  const auto [first, last] = metadata.equal_range(kSecretMetadataKey);
  if (std::distance(first, last) == 1 &&
      SecretsEqual({first->second.data(), first->second.size()}, secret)) {
    return grpc::Status::OK;
  }
  return grpc::Status(
      grpc::StatusCode::UNAUTHENTICATED,
      absl::StrCat("the metadata ", kSecretMetadataKey, " does not carry the cluster's secret"));
}

}  // namespace ringattn

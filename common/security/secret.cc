#include "common/security/secret.h"

#include <array>
#include <iterator>

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

using Digest = std::array<unsigned char, SHA256_DIGEST_LENGTH>;

Digest Sha256(absl::string_view text) {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

}  // namespace

bool SecretsEqual(absl::string_view a, absl::string_view b) {
  const Digest left = Sha256(a), right = Sha256(b);
  return CRYPTO_memcmp(left.data(), right.data(), left.size()) == 0;
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

#include "server/edge/secret.h"

#include <iterator>

#include "absl/strings/str_cat.h"

namespace ringattn::server {

bool EqualSecrets(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  // volatile: the compiler must not leave the loop early.
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = difference | static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

grpc::Status CheckSecret(const grpc::ServerContextBase& context, absl::string_view secret) {
  const auto& metadata = context.client_metadata();
  const auto [first, last] = metadata.equal_range(kSecretMetadataKey);
  if (std::distance(first, last) == 1 &&
      EqualSecrets({first->second.data(), first->second.size()}, secret)) {
    return grpc::Status::OK;
  }
  return grpc::Status(
      grpc::StatusCode::UNAUTHENTICATED,
      absl::StrCat("the metadata ", kSecretMetadataKey, " does not carry the cluster's secret"));
}

}  // namespace ringattn::server

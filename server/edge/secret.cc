#include "server/edge/secret.h"

#include <algorithm>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

constexpr size_t kMinBytes = 16;
constexpr size_t kMaxBytes = 1024;

}  // namespace

absl::StatusOr<std::string> ReadSecretFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  // One byte more than is allowed tells a long file without reading all of it.
  std::string text(kMaxBytes + 64, '\0');
  file.read(text.data(), text.size());
  if (file.bad() || (file.gcount() == 0 && !file.eof())) {
    return absl::InvalidArgumentError(absl::StrCat("cannot read the secret file ", path));
  }
  text.resize(file.gcount());
  absl::StripAsciiWhitespace(&text);
  const bool printable =
      std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  if (text.size() < kMinBytes || text.size() > kMaxBytes || !printable) {
    return absl::InvalidArgumentError(
        absl::StrCat("the secret file ", path, " must hold ", kMinBytes, " to ", kMaxBytes,
                     " printable characters without spaces"));
  }
  return text;
}

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
  return grpc::Status(grpc::StatusCode::UNAUTHENTICATED,
                      absl::StrCat("the metadata ", kSecretMetadataKey,
                                   " does not carry the cluster's secret"));
}

}  // namespace ringattn

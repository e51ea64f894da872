#include "server/identity/client_directory.h"

#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/observability/log.h"
#include "common/security/bearer_token.h"
#include "common/security/tls_material.h"

namespace ringattn::server {
namespace {

Failure Unauthenticated(const char* reason, std::string message) {
  Failure failure;
  failure.code = absl::StatusCode::kUnauthenticated;
  failure.reason = reason;
  failure.message = std::move(message);
  return failure;
}

absl::string_view View(grpc::string_ref text) { return {text.data(), text.size()}; }

}  // namespace

absl::StatusOr<std::unique_ptr<ClientDirectory>> ClientDirectory::Open(const std::string& path) {
  std::unique_ptr<ClientDirectory> directory(new ClientDirectory(path));
  if (absl::Status status = directory->Load(); !status.ok()) return status;
  directory->watch_ = std::make_unique<FileWatch>(std::vector<std::string>{path},
                                                  [d = directory.get()] { d->Reload(); });
  return directory;
}

// Reads the file without the lock, because a file system can block for any time and every call
// takes the lock.
absl::Status ClientDirectory::Load() {
  absl::StatusOr<std::string> text = ReadWholeFile(path_, "the clients file");
  if (!text.ok()) return text.status();
  {
    absl::MutexLock lock(&mutex_);
    if (known_ != nullptr && *text == text_) return absl::OkStatus();
  }
  absl::StatusOr<KnownClients> known = KnownClients::Parse(*text);
  if (!known.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": ", known.status().message()));
  }
  absl::MutexLock lock(&mutex_);
  const bool is_first = known_ == nullptr;
  text_ = *std::move(text);
  known_ = std::make_shared<const KnownClients>(*std::move(known));
  stats_.clients = static_cast<int64_t>(known_->clients().size());
  if (is_first) return absl::OkStatus();
  ++stats_.reloads;
  LogInfo("the clients file was reloaded", {{"file", path_}, {"clients", stats_.clients}});
  return absl::OkStatus();
}

void ClientDirectory::Reload() {
  const absl::Status status = Load();
  if (status.ok()) return;
  {
    absl::MutexLock lock(&mutex_);
    ++stats_.refused_reloads;
  }
  LogError("the new clients file is invalid; the previous one stays in force",
           {{"why", status.message()}});
}

DirectoryStats ClientDirectory::stats() const {
  absl::MutexLock lock(&mutex_);
  return stats_;
}

std::variant<KnownClient, Failure> ClientDirectory::Identify(const CallMetadata& metadata,
                                                             const grpc::AuthContext* auth) const {
  std::shared_ptr<const KnownClients> known;
  {
    absl::MutexLock lock(&mutex_);
    known = known_;
  }
  const Principal certificate = auth == nullptr ? Principal() : PrincipalOf(*auth);
  const KnownClient* by_certificate = known->ByCertificate(certificate);
  const auto [first, last] = metadata.equal_range(kAuthorizationKey);
  if (first == last) {
    if (by_certificate != nullptr) return *by_certificate;
    if (certificate.kind == Principal::Kind::kAnonymous) {
      return Unauthenticated("CREDENTIALS_MISSING",
                             "this server serves known clients only: send the metadata "
                             "\"authorization: Bearer TOKEN\" (--token_file), or present a "
                             "certificate (--tls_cert, --tls_key)");
    }
    return Unauthenticated(
        "CERTIFICATE_UNKNOWN",
        absl::StrCat("the certificate of ", certificate.id(),
                     " is not in the clients file: send the metadata "
                     "\"authorization: Bearer TOKEN\" (--token_file), or add it"));
  }
  if (std::distance(first, last) != 1 ||
      !absl::StartsWithIgnoreCase(View(first->second), kBearerPrefix)) {
    return Unauthenticated("CREDENTIALS_MALFORMED",
                           "the metadata authorization must be given once, as \"Bearer TOKEN\"");
  }
  const absl::string_view token = View(first->second).substr(sizeof(kBearerPrefix) - 1);
  const KnownClient* by_token = IsToken(token) ? known->ByToken(token) : nullptr;
  if (by_token == nullptr) {
    return Unauthenticated(
        "TOKEN_UNKNOWN", "the bearer token is not in the clients file; it may have been replaced");
  }
  if (by_certificate != nullptr && by_certificate != by_token) {
    return Unauthenticated("CREDENTIALS_DIFFER",
                           "the bearer token and the certificate belong to different clients");
  }
  return *by_token;
}

}  // namespace ringattn::server

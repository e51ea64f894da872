// ClientDirectory: which known client makes a call, by the token or the certificate that it
// shows. Follows its clients file while the process runs.
#ifndef RINGATTN_SERVER_IDENTITY_CLIENT_DIRECTORY_H_
#define RINGATTN_SERVER_IDENTITY_CLIENT_DIRECTORY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>

#include <grpcpp/security/auth_context.h>
#include <grpcpp/support/string_ref.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/security/file_watch.h"
#include "server/core/events/events.h"
#include "server/identity/clients_file.h"

namespace ringattn::server {

using CallMetadata = std::multimap<grpc::string_ref, grpc::string_ref>;

struct DirectoryStats {
  int64_t reloads = 0;          // since the start
  int64_t refused_reloads = 0;  // the file was replaced by what is of no use
  int64_t clients = 0;
};

// Thread safe.
class ClientDirectory {
 public:
  // Errors: INVALID_ARGUMENT, naming the file and what is wrong in it.
  static absl::StatusOr<std::unique_ptr<ClientDirectory>> Open(const std::string& path);

  // The client that a call's "authorization: Bearer TOKEN" or certificate is listed for. Both
  // may be shown if they are one client's, and a certificate that is not listed is as good as
  // none; but a token that is not known is never overlooked. Else UNAUTHENTICATED with words
  // for the caller, and as its reason one of kAuthFailureReasons.
  std::variant<KnownClient, Failure> Identify(const CallMetadata& metadata,
                                              const grpc::AuthContext* auth) const;

  DirectoryStats stats() const;

 private:
  explicit ClientDirectory(const std::string& path) : path_(path) {}

  absl::Status Load() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reload() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string path_;
  mutable absl::Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const KnownClients> known_ ABSL_GUARDED_BY(mutex_);
  DirectoryStats stats_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<FileWatch> watch_;
};

// Nothing was shown; what was shown is no bearer token; nobody's token; nobody's certificate;
// a token and a certificate of two clients.
inline constexpr const char* kAuthFailureReasons[] = {"CREDENTIALS_MISSING",
                                                      "CREDENTIALS_MALFORMED", "TOKEN_UNKNOWN",
                                                      "CERTIFICATE_UNKNOWN", "CREDENTIALS_DIFFER"};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_IDENTITY_CLIENT_DIRECTORY_H_

// ClientDirectory: identifies the known client that makes a call, by its token or certificate.
// Reloads its clients file while the process runs.
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
  int64_t refused_reloads = 0;  // the new file was invalid
  int64_t clients = 0;
};

// Thread safe.
class ClientDirectory {
 public:
  // Returns INVALID_ARGUMENT, naming the file and the error in it.
  static absl::StatusOr<std::unique_ptr<ClientDirectory>> Open(const std::string& path);

  // Returns the client that the call's "authorization: Bearer TOKEN" or certificate is listed for.
  // A call may present both if they belong to the same client. An unlisted certificate is ignored,
  // but an unknown token is always an error. Otherwise returns UNAUTHENTICATED with a message for
  // the caller and a reason from kAuthFailureReasons.
  std::variant<KnownClient, Failure> Identify(const CallMetadata& metadata,
                                              const grpc::AuthContext* auth) const;

  DirectoryStats stats() const;

 private:
  explicit ClientDirectory(const std::string& path) : path_(path) {}

  // Called by one thread at a time.
  absl::Status Load() ABSL_LOCKS_EXCLUDED(mutex_);
  void Reload() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string path_;
  mutable absl::Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const KnownClients> known_ ABSL_GUARDED_BY(mutex_);
  DirectoryStats stats_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<FileWatch> watch_;
};

// In order: no credentials; not a bearer token; an unknown token; an unknown certificate; a token
// and a certificate of two clients.
inline constexpr const char* kAuthFailureReasons[] = {"CREDENTIALS_MISSING",
                                                      "CREDENTIALS_MALFORMED", "TOKEN_UNKNOWN",
                                                      "CERTIFICATE_UNKNOWN", "CREDENTIALS_DIFFER"};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_IDENTITY_CLIENT_DIRECTORY_H_

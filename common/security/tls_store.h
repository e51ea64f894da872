// TlsStore: TLS material that follows its files while the process runs.
#ifndef RINGATTN_COMMON_SECURITY_TLS_STORE_H_
#define RINGATTN_COMMON_SECURITY_TLS_STORE_H_

#include <cstdint>
#include <memory>
#include <string>

#include <grpcpp/security/tls_certificate_provider.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/security/file_watch.h"
#include "common/security/tls_material.h"

namespace ringattn {

struct TlsState {
  absl::Time expires = absl::InfiniteFuture();  // TlsMaterial's
  int64_t reloads = 0;                          // since the start
  int64_t refused_reloads = 0;                  // files that were replaced by what is of no use
};

// gRPC's own watcher of files hands on whatever it finds, and a listener that got a damaged
// certificate serves nobody (tried with 1.51). So this one checks first: gRPC watches copies in
// memory, which change when what the files hold has proved good. What is replaced is in force
// for new connections within three seconds; those that are open stay as they are.
//
// Lives as long as the process: gRPC gives no word of when it has read the copies for the last
// time. One for each set of paths, however often it is asked for. Thread safe.
class TlsStore {
 public:
  // Errors: INVALID_ARGUMENT, naming the file, unless it was opened before.
  static absl::StatusOr<TlsStore*> Open(const TlsFiles& files);

  // For credentials of both kinds.
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider() const {
    return provider_;
  }
  bool has_identity() const { return !files_.certificate.empty(); }
  bool has_authorities() const { return !files_.authorities.empty(); }
  TlsState state() const;

 private:
  // A file without a name that is replaced in one step.
  class MemoryFile {
   public:
    absl::Status Replace(const std::string& text);
    std::string path() const;

   private:
    int fd_ = -1;
  };

  explicit TlsStore(const TlsFiles& files) : files_(files) {}

  // What the files hold, if it is good and new.
  absl::Status Load() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reload() ABSL_LOCKS_EXCLUDED(mutex_);

  const TlsFiles files_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
  mutable absl::Mutex mutex_;
  TlsMaterial material_ ABSL_GUARDED_BY(mutex_);
  MemoryFile identity_ ABSL_GUARDED_BY(mutex_);
  MemoryFile authorities_ ABSL_GUARDED_BY(mutex_);
  TlsState state_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<FileWatch> watch_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_TLS_STORE_H_

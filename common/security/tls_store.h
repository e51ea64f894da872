// TlsStore: TLS material that follows changes of its files while the process runs.
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
  absl::Time expires = absl::InfiniteFuture();  // as in TlsMaterial
  int64_t reloads = 0;                          // since the start
  int64_t refused_reloads = 0;                  // replaced files that were invalid
};

// gRPC's own file watcher passes on unchecked contents, and a listener with a damaged certificate
// rejects every connection (observed with 1.51). So this class checks the files first. gRPC watches
// copies in memory, which change only after the new contents have passed the checks. New material
// applies to new connections within three seconds; open connections are unaffected.
//
// Lives as long as the process, because gRPC does not report its last read of the copies. There is
// one store per set of paths. Thread safe.
class TlsStore {
 public:
  // Errors: INVALID_ARGUMENT, naming the file, unless the store is already open.
  static absl::StatusOr<TlsStore*> Open(const TlsFiles& files);

  // For server and channel credentials.
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider() const {
    return provider_;
  }
  bool has_identity() const { return !files_.certificate.empty(); }
  bool has_authorities() const { return !files_.authorities.empty(); }
  TlsState state() const;
  // Returns the present material, for connections that are not gRPC's.
  TlsMaterial material() const;

 private:
  // An unnamed file in memory that is replaced atomically.
  class MemoryFile {
   public:
    MemoryFile() = default;
    ~MemoryFile();
    MemoryFile(const MemoryFile&) = delete;
    MemoryFile& operator=(const MemoryFile&) = delete;

    absl::Status Replace(const std::string& text);
    std::string path() const;

   private:
    int fd_ = -1;
  };

  explicit TlsStore(const TlsFiles& files) : files_(files) {}

  // Loads the files' contents if they are valid and new.
  absl::Status Load() ABSL_LOCKS_EXCLUDED(mutex_);
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

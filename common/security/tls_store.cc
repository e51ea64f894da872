#include "common/security/tls_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/observability/log.h"

namespace ringattn {
namespace {

constexpr unsigned kRefreshSeconds = 1;  // interval at which gRPC checks the copies

std::vector<std::string> PathsOf(const TlsFiles& files) {
  std::vector<std::string> paths;
  for (const std::string& path : {files.certificate, files.key, files.authorities}) {
    if (!path.empty()) paths.push_back(path);
  }
  return paths;
}

}  // namespace

TlsStore::MemoryFile::~MemoryFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status TlsStore::MemoryFile::Replace(const std::string& text) {
  const int fd = memfd_create("ringattn-tls", MFD_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, "memfd_create");
  if (write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    const absl::Status status = absl::ErrnoToStatus(errno, "writing TLS material to memory");
    close(fd);
    return status;
  }
  if (fd_ < 0) {
    fd_ = fd;
    return absl::OkStatus();
  }
  // A reader of the path sees either all of the old or all of the new contents.
  const int replaced = dup3(fd, fd_, O_CLOEXEC);
  close(fd);
  return replaced < 0 ? absl::ErrnoToStatus(errno, "dup3") : absl::OkStatus();
}

std::string TlsStore::MemoryFile::path() const {
  return fd_ < 0 ? "" : absl::StrCat("/proc/self/fd/", fd_);
}

absl::StatusOr<TlsStore*> TlsStore::Open(const TlsFiles& files) {
  static auto* mutex = new absl::Mutex;
  static auto* stores = new std::map<TlsFiles, TlsStore*>;
  {
    absl::MutexLock lock(mutex);
    if (const auto found = stores->find(files); found != stores->end()) return found->second;
  }
  std::unique_ptr<TlsStore> store(new TlsStore(files));
  if (absl::Status status = store->Load(); !status.ok()) return status;
  absl::MutexLock lock(mutex);
  if (const auto found = stores->find(files); found != stores->end()) return found->second;
  std::string identity, authorities;
  {
    absl::MutexLock store_lock(&store->mutex_);
    identity = store->identity_.path();
    authorities = store->authorities_.path();
  }
  // Key and certificates are in one file, so they always belong together.
  store->provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      identity, identity, authorities, kRefreshSeconds);
  store->watch_ = std::make_unique<FileWatch>(PathsOf(files), [s = store.get()] { s->Reload(); });
  return stores->emplace(files, store.release()).first->second;
}

// Reads the files without the lock, because a file system can block for any time.
absl::Status TlsStore::Load() {
  absl::StatusOr<TlsMaterial> read = ReadTlsFiles(files_, absl::Now());
  if (!read.ok()) return read.status();
  absl::MutexLock lock(&mutex_);
  const bool new_identity = read->identity_pem != material_.identity_pem;
  const bool new_authorities = read->authorities_pem != material_.authorities_pem;
  if (new_identity) {
    if (absl::Status status = identity_.Replace(read->identity_pem); !status.ok()) return status;
  }
  if (new_authorities) {
    absl::Status status = authorities_.Replace(read->authorities_pem);
    if (!status.ok()) return status;
  }
  const bool is_first = material_.identity_pem.empty() && material_.authorities_pem.empty();
  material_ = *std::move(read);
  state_.expires = material_.expires;
  if (is_first || (!new_identity && !new_authorities)) return absl::OkStatus();
  ++state_.reloads;
  LogInfo("TLS files were reloaded",
          {{"certificate", files_.certificate},
           {"authorities", files_.authorities},
           {"expires", absl::FormatTime(absl::RFC3339_sec, state_.expires, absl::UTCTimeZone())}});
  return absl::OkStatus();
}

void TlsStore::Reload() {
  const absl::Status status = Load();
  if (status.ok()) return;
  {
    absl::MutexLock lock(&mutex_);
    ++state_.refused_reloads;
  }
  LogError("replaced TLS files are invalid; the old ones stay in force",
           {{"why", status.message()}});
}

TlsState TlsStore::state() const {
  absl::MutexLock lock(&mutex_);
  return state_;
}

TlsMaterial TlsStore::material() const {
  absl::MutexLock lock(&mutex_);
  return material_;
}

}  // namespace ringattn

// RegionListener: the Unix socket over which clients on this machine pass their memory to this
// worker. proto/ringattn/v1/local_memory.proto defines the protocol.
#ifndef RINGATTN_WORKER_REGION_REGION_LISTENER_H_
#define RINGATTN_WORKER_REGION_REGION_LISTENER_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/local_socket.h"
#include "common/local_memory/scoped_descriptor.h"
#include "worker/region/region.h"
#include "worker/region/region_importer.h"

namespace ringattn::worker {

struct RegionListenerOptions {
  std::string socket_path;
  std::vector<uid_t> uids;  // users whose processes are accepted
  // A connection that has not presented a token by then is closed.
  absl::Duration attach_timeout = absl::Seconds(5);
  // How long to wait for an unknown token, which may still be on its way from the coordinator.
  absl::Duration token_wait = absl::Seconds(2);
  size_t max_unattached = 64;  // connections without a region; the oldest is evicted
  size_t max_regions = 512;
  // Imports CUDA memory, at most max_imported_bytes of allocations at a time. Must outlive the
  // regions. If null, or if it cannot import, only host memory is accepted.
  Device* device = nullptr;
  int64_t max_imported_bytes = 0;
};

// Called on the listener's thread, without locks, possibly before Start has returned. `regions`:
// the current number of regions.
struct RegionListenerHooks {
  std::function<void(const std::shared_ptr<Region>&, size_t regions)> on_attached;
  // The client has closed the socket or is gone. The region has been released.
  std::function<void(const std::shared_ptr<Region>&, size_t regions)> on_gone;
  std::function<void(AttachCode)> on_refused;
  // The total of imported bytes has changed. Called on any thread, possibly after Stop. May be
  // empty.
  std::function<void(int64_t bytes)> on_imported_bytes;
};

// Thread safe.
class RegionListener {
 public:
  // Starts listening; removes a socket file that a dead worker left at the path. Returns an error
  // if the socket cannot be created.
  static absl::StatusOr<std::unique_ptr<RegionListener>> Start(RegionListenerOptions options,
                                                               RegionListenerHooks hooks);
  ~RegionListener();
  // Releases all regions without calling hooks, and stops accepting. No hook is running when it
  // returns. Idempotent; must not be called from a hook.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  // Accepts one client with this token until `deadline`. An earlier token of the region becomes
  // invalid.
  void Expect(const std::string& region_id, const std::string& token, int64_t bytes,
              absl::Time deadline, bool is_cuda = false) ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops the region's token. Releases the region, if it is attached, and closes its socket.
  void Forget(const std::string& region_id) ABSL_LOCKS_EXCLUDED(mutex_);
  // Releases all regions and drops all expected tokens.
  void ForgetAll() ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns null if the region is not attached or has been released.
  std::shared_ptr<Region> Find(const std::string& region_id) const ABSL_LOCKS_EXCLUDED(mutex_);
  size_t regions() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Expected {
    std::string region_id;
    std::string token;
    int64_t bytes = 0;
    absl::Time deadline;
    bool is_cuda = false;
    bool is_spent = false;
  };
  struct Connection {
    ScopedDescriptor socket;
    absl::Time deadline;  // until a region is attached
    std::shared_ptr<Region> region;
    // A presented token that is not known yet, with its descriptor; empty token: none.
    AttachMessage presented = {};
    ScopedDescriptor memory = {};
    absl::Time token_deadline = absl::InfiniteFuture();
    // Pending import of CUDA memory, and for which region.
    std::shared_ptr<RegionImporter::Import> import = nullptr;
    std::string region_id = {};
  };

  RegionListener(RegionListenerOptions options, RegionListenerHooks hooks,
                 ScopedDescriptor listener, ScopedDescriptor wake);

  void Run();
  void Wake();
  void Accept();
  void EvictOldest();
  // Returns false if the connection must be closed.
  bool Serve(Connection& connection);
  bool TakeToken(Connection& connection, const AttachMessage& message, LocalMessage& received);
  bool Attach(Connection& connection);
  bool AttachHost(Connection& connection, const Expected& expected);
  bool BeginImport(Connection& connection, const Expected& expected);
  bool FinishImport(Connection& connection);
  bool Keep(Connection& connection, std::shared_ptr<Region> region);
  bool MayKeep(const Connection& connection, const std::string& region_id);
  bool Refuse(const Connection& connection, AttachCode code, absl::string_view detail);
  bool RefuseVersion(const Connection& connection, uint32_t version);
  bool Answer(const Connection& connection, const WorkerAnswer& answer);
  // Closes a connection and releases its region, if any.
  void Close(size_t index);
  void CloseForgotten();
  // Returns the entry of the token and marks it spent. Sets *known if the token is known, or was
  // recently.
  std::optional<Expected> TakeExpected(const std::string& token, bool* known)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const RegionListenerOptions options_;
  const RegionListenerHooks hooks_;
  const ScopedDescriptor listener_;
  const ScopedDescriptor wake_;               // an eventfd
  std::unique_ptr<RegionImporter> importer_;  // null: host memory only
  std::vector<Connection> connections_;       // used by the thread only

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Expected> expected_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Region>> regions_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Region>> forgotten_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: starts when the other members exist
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_REGION_LISTENER_H_

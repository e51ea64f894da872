// RegionListener: the Unix socket over which clients of this machine hand their memory to this
// worker. What is said on it: proto/ringattn/v1/local_memory.proto.
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
  std::vector<uid_t> uids;  // of the processes that are served
  // A connection that has not shown a token by then is closed.
  absl::Duration attach_timeout = absl::Seconds(5);
  // A token that is not known may be on its way from the coordinator: so long it is waited for.
  absl::Duration token_wait = absl::Seconds(2);
  size_t max_unattached = 64;  // connections without a region; the oldest goes
  size_t max_regions = 512;
  // What maps CUDA memory, at most so many bytes of allocations at a time. Outlives the regions.
  // Null, or one that imports none: only host memory is taken.
  Device* device = nullptr;
  int64_t max_imported_bytes = 0;
};

// Called by the listener's thread, without locks, perhaps before Start has returned. `regions`: how
// many there are now.
struct RegionListenerHooks {
  std::function<void(const std::shared_ptr<Region>&, size_t regions)> on_attached;
  // The client has closed the socket, or is gone. The region is released already.
  std::function<void(const std::shared_ptr<Region>&, size_t regions)> on_gone;
  std::function<void(AttachCode)> on_refused;
  // What is imported in all has changed; on any thread, perhaps after Stop. May be empty.
  std::function<void(int64_t bytes)> on_imported_bytes;
};

// Thread safe.
class RegionListener {
 public:
  // Takes a socket's file that a dead worker left at the path away. The errors are the listener's.
  static absl::StatusOr<std::unique_ptr<RegionListener>> Start(RegionListenerOptions options,
                                                               RegionListenerHooks hooks);
  ~RegionListener();
  // Releases all regions, of which the hooks hear nothing, and takes no more. When it returns no
  // hook is running. Idempotent; not from a hook.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  // A client may come with this token until `deadline`, once. A token that the region had before is
  // not taken any more.
  void Expect(const std::string& region_id, const std::string& token, int64_t bytes,
              absl::Time deadline, bool is_cuda = false) ABSL_LOCKS_EXCLUDED(mutex_);
  // Releases the region, if it is here, and closes its socket.
  void Forget(const std::string& region_id) ABSL_LOCKS_EXCLUDED(mutex_);
  // All of them, and whatever was expected.
  void ForgetAll() ABSL_LOCKS_EXCLUDED(mutex_);

  // Null if it is not here, or released.
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
    absl::Time deadline;  // until it has a region
    std::shared_ptr<Region> region;
    // Shown and not known yet, with its descriptor; without a token: none.
    AttachMessage shown = {};
    ScopedDescriptor memory = {};
    absl::Time token_deadline = absl::InfiniteFuture();
    // CUDA memory on its way, and for which region.
    std::shared_ptr<RegionImporter::Import> import = nullptr;
    std::string region_id = {};
  };

  RegionListener(RegionListenerOptions options, RegionListenerHooks hooks,
                 ScopedDescriptor listener, ScopedDescriptor wake);

  void Run();
  void Wake();
  void Accept();
  void EvictOldest();
  // False: the connection is to be closed.
  bool Serve(Connection& connection);
  bool TakeToken(Connection& connection, const AttachMessage& message, LocalMessage& received);
  bool Attach(Connection& connection);
  bool AttachHost(Connection& connection, const Expected& expected);
  bool BeginImport(Connection& connection, const Expected& expected);
  bool FinishImport(Connection& connection);
  bool Keep(Connection& connection, std::shared_ptr<Region> region);
  bool MayKeep(const Connection& connection, const std::string& region_id);
  bool Refuse(const Connection& connection, AttachCode code, absl::string_view words);
  bool RefuseVersion(const Connection& connection, uint32_t version);
  bool Answer(const Connection& connection, const WorkerAnswer& answer);
  // With its region, if it has one.
  void Close(size_t index);
  void CloseForgotten();
  // Marks it spent. `known`: it is, or was not long ago.
  std::optional<Expected> TakeExpected(const std::string& token, bool* known)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const RegionListenerOptions options_;
  const RegionListenerHooks hooks_;
  const ScopedDescriptor listener_;
  const ScopedDescriptor wake_;               // an eventfd
  std::unique_ptr<RegionImporter> importer_;  // null: host memory alone
  std::vector<Connection> connections_;       // the thread's own

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Expected> expected_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Region>> regions_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Region>> forgotten_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: starts when the rest is there
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_REGION_LISTENER_H_

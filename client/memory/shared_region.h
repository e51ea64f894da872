// SharedRegion: what stands behind a Region (region.h): the memory, the sockets over which the
// workers have it, and the thread that looks after them.
#ifndef RINGATTN_CLIENT_MEMORY_SHARED_REGION_H_
#define RINGATTN_CLIENT_MEMORY_SHARED_REGION_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/memory/cuda_memory.h"
#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/scoped_descriptor.h"
#include "ringattn/v1/local_memory.pb.h"

namespace ringattn::client {

// Shared by the Region and the calls that use it. Thread safe.
class SharedRegion {
 public:
  // LocalMemoryService.Attach, blocking and bounded. Called on the region's thread.
  using AttachCall = std::function<absl::StatusOr<v1::AttachResponse>(const v1::AttachRequest&)>;

  // Sealed and populated memory of `bytes`, rounded up to pages. RESOURCE_EXHAUSTED if there is
  // none; INVALID_ARGUMENT for 0 bytes.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Make(int64_t bytes, AttachCall attach);
  // The same of memory on a GPU.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> MakeOf(
      std::shared_ptr<const CudaMemory> memory, AttachCall attach);
  // REQUIRES: Stop() was called.
  ~SharedRegion();

  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Null of host memory; else data() is an address on its GPU.
  const CudaMemory* cuda() const { return cuda_.get(); }

  // Waits until the workers have been shown it once, or could not be.
  void AwaitFirstRound(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // Shows it to those that lack it, soon: one has been started again, perhaps.
  void AttachAgain() ABSL_LOCKS_EXCLUDED(mutex_);
  // How many times a worker has taken it, of which the coordinator has heard.
  uint64_t attachments() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The same as AttachAgain; `done` once there have been more attachments than `than`, or those
  // that lack it have been shown it from now on and none took it: `taken` says which. Called at
  // once, on the region's thread, or by Stop.
  using Shown = std::function<void(bool taken)>;
  void ShowAgain(uint64_t than, Shown done) ABSL_LOCKS_EXCLUDED(mutex_);

  // Its present name at the coordinator; empty: it has none, and `why` says why.
  std::string id(std::string* why) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The workers that have it.
  std::vector<std::string> workers() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Why others have not; empty: nothing is known against it.
  std::string trouble() const ABSL_LOCKS_EXCLUDED(mutex_);

  // From `done` on no worker writes for the stream of this number. Called on the region's
  // thread, or at once if it has stopped: the workers then see the socket's end. `unsure` names a
  // worker that did not answer within the bound; empty: all did, or are gone.
  using Fenced = std::function<void(const std::string& unsure)>;
  void Fence(uint64_t number, Fenced done) ABSL_LOCKS_EXCLUDED(mutex_);

  // Closes the sockets: the workers release the region. Not from its own thread. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct PendingFence {
    uint64_t number = 0;
    Fenced done;
    std::vector<std::string> waits_for;  // workers
    absl::Time deadline;
  };

  // Of ShowAgain.
  struct PendingShow {
    uint64_t than = 0;
    uint64_t round = 0;  // over with this one at the latest
    Shown done;
  };

  SharedRegion(uint8_t* data, int64_t bytes, ScopedDescriptor memory,
               std::shared_ptr<const CudaMemory> cuda, ScopedDescriptor wake, AttachCall attach);

  void Run();
  void Wake();
  // Not done yet with all workers: how long to wait for another try.
  void AttachRound();
  // False: another try may do better.
  bool Attach(const v1::AttachPoint& point, std::vector<std::string>* trouble);
  void Confirm(const v1::AttachRequest& request);
  void Poll();
  void SendFences();
  void ServeSocket(const std::string& worker);
  void DropWorker(const std::string& worker);
  void FinishFences(absl::Time now);
  void FinishShows();

  uint8_t* const data_;
  const int64_t bytes_;
  const ScopedDescriptor memory_;  // of host memory
  const std::shared_ptr<const CudaMemory> cuda_;
  const ScopedDescriptor wake_;                      // an eventfd
  AttachCall attach_;                                // the thread's own, as all up to mutex_
  std::map<std::string, ScopedDescriptor> sockets_;  // by worker
  uint64_t taken_ = 0;                               // attachments, the present round's included
  std::vector<PendingFence> sent_fences_;
  absl::Time next_round_ = absl::InfinitePast();
  absl::Duration backoff_;

  mutable absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool round_wanted_ ABSL_GUARDED_BY(mutex_) = true;
  bool first_round_over_ ABSL_GUARDED_BY(mutex_) = false;
  std::string id_ ABSL_GUARDED_BY(mutex_);
  std::string trouble_ ABSL_GUARDED_BY(mutex_) = "it has not been attached yet";
  std::vector<std::string> workers_ ABSL_GUARDED_BY(mutex_);
  std::deque<PendingFence> fences_ ABSL_GUARDED_BY(mutex_);
  uint64_t attachments_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t rounds_begun_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t rounds_over_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<PendingShow> shows_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_SHARED_REGION_H_

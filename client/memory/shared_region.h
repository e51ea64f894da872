// SharedRegion: the implementation of Region and CudaRegion: the memory, the sockets over which
// workers have it attached, and the thread that maintains them.
// Tests: shared_region_test.cc.
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
  // LocalMemoryService.Attach: blocking, with a deadline. Called on the region's thread.
  using AttachCall = std::function<absl::StatusOr<v1::AttachResponse>(const v1::AttachRequest&)>;

  // Allocates `bytes` of sealed and populated memory, rounded up to pages. RESOURCE_EXHAUSTED
  // without memory; INVALID_ARGUMENT for 0 bytes.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Make(int64_t bytes, AttachCall attach);
  // The same for GPU memory.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> MakeOf(
      std::shared_ptr<const CudaMemory> memory, AttachCall attach);
  // Requires that Stop() was called.
  ~SharedRegion();

  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Null for host memory; otherwise data() is an address on its GPU.
  const CudaMemory* cuda() const { return cuda_.get(); }

  // A timeout for host memory: each worker answers in milliseconds.
  static constexpr absl::Duration kFirstRound = absl::Seconds(10);
  // Waits until attaching has been tried once with all workers.
  void AwaitFirstRound(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // Attaches the region soon to workers that lack it, for example after a restart.
  void AttachAgain() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns how many attachments by workers the coordinator has confirmed.
  uint64_t attachments() const ABSL_LOCKS_EXCLUDED(mutex_);
  // As AttachAgain. Calls `done` once there have been more attachments than `than` (true), or a
  // round that began after this call has found no worker that attaches it (false). Called
  // immediately, on the region's thread, or by Stop.
  using Reattached = std::function<void(bool taken)>;
  void Reattach(uint64_t than, Reattached done) ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns the region's present name at the coordinator; empty, with the reason in `why`, if it
  // has none.
  std::string id(std::string* why) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The workers that have it attached.
  std::vector<std::string> workers() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Why other workers do not have it attached; empty if no problem is known.
  std::string trouble() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls `done` once no worker writes for the stream with this number any more. Called on the
  // region's thread, or immediately if that has stopped, because workers then see the socket's end.
  // `unsure` names a worker that did not answer in time; empty if all answered or are gone.
  using Fenced = std::function<void(const std::string& unsure)>;
  void Fence(uint64_t number, Fenced done) ABSL_LOCKS_EXCLUDED(mutex_);

  // Closes the sockets, upon which the workers release the region. Must not run on the region's
  // thread. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct PendingFence {
    uint64_t number = 0;
    Fenced done;
    std::vector<std::string> waits_for;  // workers
    absl::Time deadline;
  };

  // A pending Reattach.
  struct PendingReattach {
    uint64_t than = 0;
    uint64_t round = 0;  // completed by this round at the latest
    Reattached done;
  };

  SharedRegion(uint8_t* data, int64_t bytes, ScopedDescriptor memory,
               std::shared_ptr<const CudaMemory> cuda, ScopedDescriptor wake, AttachCall attach);

  void Run();
  void Wake();
  // Returns how long to wait before the next try if some workers have not attached it.
  void AttachRound();
  // Returns false if another try may succeed.
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
  const ScopedDescriptor wake_;  // an eventfd
  AttachCall attach_;            // used by the thread alone, as all members up to mutex_
  std::map<std::string, ScopedDescriptor> sockets_;  // by worker
  uint64_t taken_ = 0;                               // attachments, including the present round's
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
  std::vector<PendingReattach> reattaches_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_SHARED_REGION_H_

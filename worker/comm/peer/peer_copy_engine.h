// PeerCopyEngine: transfers between GPUs of one machine by their copy engines. The receiver
// copies out of the sender's memory, which it has mapped, so that
//   - no SM takes part: transfers begin at once beside kernels that fill the device;
//   - nobody writes into another rank's memory, however late a copy comes.
//
// A send of bytes in one of the sender's regions, to be the n-th to that receiver:
//   sender's stream    ... what makes the bytes | receiver.ready = n | wait own.pulled >= n
//   sender's thread    notice n {region, offset, bytes} into the receiver's segment
//   receiver's thread  sees notice n and the n-th receive, then puts on a stream of its own
//                      wait: targets are free | wait own.ready >= n | copy |
//                      sender.pulled = n | own.received = n
//   receiver's stream  ... wait own.received >= n
// Links that sleep between requests are waked by reading a little of each peer's memory, ahead
// of the first group (WakeLinks).
// Words are of the segments (peer_segment.h). Only the notices pass through host threads,
// and those run ahead: groups are started while earlier ones are under way. A region is
// mapped when the first notice names it: some 10 ms, for which no stream has to wait.
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_COPY_ENGINE_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_COPY_ENGINE_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/cuda/transfer_engine.h"
#include "worker/comm/peer/peer_segment.h"
#include "worker/comm/peer/stream_flags.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/device_region.h"

namespace ringattn::worker {

// Maps a region of another rank into this process.
struct PeerMapper {
  // `index`: in that rank's table.
  std::function<absl::StatusOr<char*>(int index, const PeerRegion& region)> map;
  std::function<void(char* base)> unmap;  // may be null
  // What is mapped can be read although its owner is gone.
  bool outlives_peer = false;
  // Set when `map` is to give up whatever it waits for; may be null.
  std::shared_ptr<std::atomic<bool>> interrupted = nullptr;
};

// Another rank as this one sees it; itself: all empty.
struct PeerMapping {
  std::unique_ptr<PeerSegment> segment;  // registered
  PeerMapper mapper;
  std::vector<DeviceRegion> regions;  // those of its table that are mapped, in this process
};

struct PeerCopyOptions {
  int rank = 0;
  absl::Duration abort_timeout = absl::Seconds(5);
  std::function<void(const std::string&)> on_stuck;  // may be null
  std::shared_ptr<const void> kept = nullptr;  // let go of with the engine: what peers may ask for
};

// A rank that aborts lets its own streams pass whatever they wait for: what it still announces
// then may be garbage, and a peer's transfer may end well with it. The operation has failed
// on the aborting rank, and with it as a whole.
//
// Thread safe, as TransferEngine says. Sends must lie in the regions; ranks that disagree
// on a transfer's size are found out.
class PeerCopyEngine : public TransferEngine {
 public:
  // `own` is registered; `peers` by rank. INTERNAL if no streams can be made.
  static absl::StatusOr<std::unique_ptr<PeerCopyEngine>> Create(
      PeerCopyOptions options, CudaEventPool* events, const StreamFlags* flags,
      DeviceRegions regions, std::unique_ptr<PeerSegment> own, std::vector<PeerMapping> peers);
  ~PeerCopyEngine() override;

  // Enters regions into the segment's table that are not in it yet.
  static absl::Status PublishRegions(const std::vector<DeviceRegion>& regions,
                                     PeerSegment& segment);
  // Maps what the peer has entered and is not mapped yet.
  static absl::Status MapRegions(PeerMapping& peer);

  bool takes_compute_units() const override { return false; }
  absl::Status Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream) override;
  void WakeLinks() override;
  absl::Status AsyncError() override;
  void Interrupt() override;
  // Waiting ends at once, copies under way in milliseconds; kernels that the stream waits
  // for have to come to an end by themselves.
  void Abort() override;

 private:
  struct Pull {
    void* target = nullptr;
    int64_t bytes = 0;
    bool ends_group = false;
    std::shared_ptr<const CudaEvent> targets_free;
  };

  // What is to be copied from one peer, in order.
  using Pulls = std::deque<Pull>;
  // What one peer has to be told, in order, and how much of it was.
  struct Outgoing {
    std::deque<PeerNotice> notices;
    uint64_t posted = 0;
  };

  // Transfers with one peer that were enqueued, by direction.
  struct Enqueued {
    uint64_t sends = 0;
    uint64_t receives = 0;
  };

  PeerCopyEngine(PeerCopyOptions options, CudaEventPool* events, const StreamFlags* flags,
                 DeviceRegions regions, std::unique_ptr<PeerSegment> own,
                 std::vector<PeerMapping> peers);
  absl::Status MakeStreams();

  absl::Status Check(const std::vector<PeerTransfer>& group) const;
  // Where the bytes lie, in a region that is in the own segment's table by then.
  absl::StatusOr<PeerNotice> NoticeOf(const PeerTransfer& send);
  absl::Status PutFlags(const std::vector<Enqueued>& last, cudaStream_t stream) const;

  void Run();
  // Starts what copies can be started now, and removes them from `pulls`.
  absl::Status Advance(std::vector<Pulls>& pulls);
  // Tells peers what there is room for. False: something is left.
  bool Post() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PullFrom(int peer, Pulls& pulls);
  absl::Status StartCopy(int peer, uint64_t number, const PeerNotice& notice, const Pull& pull);

  // Reads a little of every peer's memory, if nothing has been copied for a while.
  absl::Status Wake();

  // Lets this rank's streams pass whatever they wait for, for now.
  void Release();

  const PeerCopyOptions options_;
  CudaEventPool* const events_;
  const StreamFlags* const flags_;
  const DeviceRegions regions_;
  const std::unique_ptr<PeerSegment> own_;
  std::vector<PeerMapping> peers_;     // mapped regions: the thread's
  std::vector<cudaStream_t> streams_;  // by peer, for copies from it; own rank: null

  std::vector<Enqueued> enqueued_;           // Enqueue's
  std::vector<DeviceRegion> known_regions_;  // Enqueue's: those in the own table
  std::vector<uint64_t> pulled_;             // the thread's, by peer
  cudaStream_t wake_stream_ = nullptr;
  void* woken_into_ = nullptr;                   // device memory that nobody reads
  absl::Time last_copy_ = absl::InfinitePast();  // the thread's: when one was begun

  // No call of CUDA is made under it: those may wait for a stream that waits for a peer.
  absl::Mutex mutex_;
  absl::CondVar changed_;
  std::vector<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);  // by peer
  std::vector<Pulls> fresh_ ABSL_GUARDED_BY(mutex_);        // not yet seen by the thread
  bool has_fresh_ ABSL_GUARDED_BY(mutex_) = false;
  bool wake_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  bool interrupted_ ABSL_GUARDED_BY(mutex_) = false;
  bool thread_is_done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  cudaStream_t group_stream_ ABSL_GUARDED_BY(mutex_) = nullptr;

  absl::Mutex ending_;  // held during Abort
  bool ended_ ABSL_GUARDED_BY(ending_) = false;

  std::thread thread_;  // last: uses the rest. Ends after Interrupt()
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_COPY_ENGINE_H_

// PeerCopyEngine: transfers between GPUs of one machine by their copy engines. The receiver copies
// out of the sender's memory, which it has mapped. Therefore
//   - no SM takes part: transfers start at once next to kernels that fill the device;
//   - no rank writes into another rank's memory, however late a copy runs.
//
// The n-th send to a receiver, of bytes in one of the sender's regions:
//   sender's stream    ... produce the bytes | receiver.ready = n | wait own.pulled >= n
//   sender's thread    posts send n {region, offset, bytes} in the receiver's segment
//   receiver's thread  sees send n and the n-th receive, then enqueues on a separate stream:
//                      wait until targets are free | wait own.ready >= n | copy |
//                      sender.pulled = n | own.received = n
//   receiver's stream  ... wait own.received >= n
//
// The words are in the segments (peer_segment.h). Only posted sends pass through host threads,
// which run ahead: groups are started while earlier ones are in flight. A region is mapped when the
// first posted send names it, which takes about 10 ms and delays no stream. WakeLinks reads a
// little of each peer's memory before the first group, because links sleep between requests.
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_COPY_ENGINE_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_COPY_ENGINE_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/cuda/stream_flags.h"
#include "worker/comm/cuda/transfer_engine.h"
#include "worker/comm/peer/peer_segment.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/device_region.h"

namespace ringattn::worker {

// Maps regions of another rank into this process.
struct PeerMapper {
  // `index`: in that rank's table.
  std::function<absl::StatusOr<char*>(int index, const PeerRegion& region)> map;
  std::function<void(char* base)> unmap;  // may be null
  // Mapped memory stays readable after its owner is gone.
  bool outlives_peer = false;
  // Set to make `map` stop waiting; may be null.
  std::shared_ptr<std::atomic<bool>> interrupted = nullptr;
};

// Another rank as this one sees it. Empty for this rank itself and for ranks with which it does not
// exchange.
struct PeerMapping {
  std::unique_ptr<PeerSegment> segment;  // registered
  PeerMapper mapper;
  std::vector<DeviceRegion> regions;  // the mapped regions of its table, as mapped here
};

struct PeerCopyOptions {
  int rank = 0;
  std::string transport;  // the name to report
  absl::Duration abort_timeout = absl::Seconds(5);
  std::function<void(const std::string&)> on_stuck;  // may be null
  std::shared_ptr<const void> kept = nullptr;  // what peers may request; released with the engine
};

// A rank that aborts releases its own streams from every wait. Data that it still posts may be
// garbage, and a peer's transfer may report success with it. The operation has already failed on
// the aborting rank, and so as a whole.
//
// Thread safe, as TransferEngine requires. Sends must lie within the regions. A size mismatch
// between ranks is detected.
class PeerCopyEngine : public TransferEngine {
 public:
  // `own` is registered; `peers` by rank. Returns INTERNAL if streams cannot be created.
  static absl::StatusOr<std::unique_ptr<PeerCopyEngine>> Create(
      PeerCopyOptions options, CudaEventPool* events, const StreamFlags* flags,
      DeviceRegions regions, std::unique_ptr<PeerSegment> own, std::vector<PeerMapping> peers);
  ~PeerCopyEngine() override;

  // Adds regions to the segment's table that are not in it yet.
  static absl::Status PublishRegions(const std::vector<DeviceRegion>& regions,
                                     PeerSegment& segment);
  // Maps the peer's regions that are not mapped yet.
  static absl::Status MapRegions(PeerMapping& peer);

  std::string transport(int) const override { return options_.transport; }
  bool takes_compute_units(int) const override { return false; }
  absl::Status Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream,
                       const std::shared_ptr<GroupFailure>& failure) override;
  void WakeLinks() override;
  absl::Status AsyncError() override;
  void Interrupt() override;
  // Waits end at once, copies in flight within milliseconds. Kernels that the stream waits for must
  // end without help.
  void Abort() override;

 private:
  struct Pull {
    void* target = nullptr;
    int64_t bytes = 0;
    bool ends_group = false;
    std::shared_ptr<const CudaEvent> targets_free;
  };

  // Pending copies from one peer, in order.
  using Pulls = std::deque<Pull>;
  // Sends to announce to one peer, in order, and how many have been posted.
  struct Outgoing {
    std::deque<PostedSend> sends;
    uint64_t posted = 0;
  };

  // Number of transfers enqueued with one peer, by direction.
  struct Enqueued {
    uint64_t sends = 0;
    uint64_t receives = 0;
  };

  PeerCopyEngine(PeerCopyOptions options, CudaEventPool* events, const StreamFlags* flags,
                 DeviceRegions regions, std::unique_ptr<PeerSegment> own,
                 std::vector<PeerMapping> peers);
  absl::Status MakeStreams();

  absl::Status Check(const std::vector<PeerTransfer>& group) const;
  // Describes where the bytes are; adds their region to the own segment's table if needed.
  absl::StatusOr<PostedSend> DescribeSend(const PeerTransfer& send);
  absl::Status PutFlags(const std::vector<Enqueued>& last, cudaStream_t stream) const;

  void Run();
  // Starts the copies that can start now and removes them from `pulls`.
  absl::Status Advance(std::vector<Pulls>& pulls);
  // Posts as many sends as there is room for. Returns false if some are left.
  bool Post() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PullFrom(int peer, Pulls& pulls);
  absl::Status StartCopy(int peer, uint64_t number, const PostedSend& posted_send,
                         const Pull& pull);

  // Reads a little of every peer's memory, unless something was copied recently.
  absl::Status Wake();

  // Releases this rank's streams from what they wait for now.
  void Release();

  const PeerCopyOptions options_;
  CudaEventPool* const events_;
  const StreamFlags* const flags_;
  const DeviceRegions regions_;
  const std::unique_ptr<PeerSegment> own_;
  std::vector<PeerMapping> peers_;     // mapped regions: used by the thread only
  std::vector<cudaStream_t> streams_;  // by peer, for copies from it; null without a mapping

  std::vector<Enqueued> enqueued_;           // used by Enqueue only
  std::vector<DeviceRegion> known_regions_;  // used by Enqueue only: regions in the own table
  std::vector<uint64_t> pulled_;             // used by the thread only, by peer
  cudaStream_t wake_stream_ = nullptr;
  void* woken_into_ = nullptr;  // device memory that is never read
  absl::Time last_copy_ =
      absl::InfinitePast();  // used by the thread only: when a copy was last started

  // No CUDA call is made under it, because such a call may wait for a stream that waits for a peer.
  absl::Mutex mutex_;
  absl::CondVar changed_;
  std::vector<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);  // by peer
  std::vector<Pulls> fresh_ ABSL_GUARDED_BY(mutex_);        // not yet seen by the thread
  bool has_fresh_ ABSL_GUARDED_BY(mutex_) = false;
  bool wake_wanted_ ABSL_GUARDED_BY(mutex_) = false;
  bool interrupted_ ABSL_GUARDED_BY(mutex_) = false;
  bool thread_is_done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  std::set<cudaStream_t> group_streams_ ABSL_GUARDED_BY(mutex_);  // one per lane

  absl::Mutex ending_;  // held during Abort
  bool ended_ ABSL_GUARDED_BY(ending_) = false;

  std::thread thread_;  // last: uses the other members. Ends after Interrupt()
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_COPY_ENGINE_H_

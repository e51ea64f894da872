// StreamCommunicator: ordered groups of transfers between GPUs, on a separate high-priority stream
// for each lane, so that they overlap with compute. A TransferEngine moves the bytes; this class
// handles dependencies, deadlines and abort.
#ifndef RINGATTN_WORKER_COMM_CUDA_STREAM_COMMUNICATOR_H_
#define RINGATTN_WORKER_COMM_CUDA_STREAM_COMMUNICATOR_H_

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/cuda/step_deadlines.h"
#include "worker/comm/cuda/transfer_engine.h"
#include "worker/device/cuda/cuda_event.h"

namespace ringattn::worker {

// Thread safe, as Communicator requires. Its events are CudaEvents. Both peers skip empty
// transfers. Within a group, the n-th send of a rank to itself is copied to its n-th receive from
// itself.
//
// REQUIRES for every group: memory of the device; `after` consists of CudaEvents of the device or
// events that are done.
class StreamCommunicator : public Communicator {
 public:
  // `engine` has joined its ring; null for a ring of one. `alone`: the name of what carries the
  // bytes of a ring of one. Returns INTERNAL if the stream cannot be created.
  static absl::StatusOr<std::unique_ptr<StreamCommunicator>> Create(
      std::unique_ptr<TransferEngine> engine, std::string alone, CudaEventPool* events, int rank,
      int world_size, absl::Duration step_timeout);
  ~StreamCommunicator() override;

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string transport(int peer) const override {
    return engine_ != nullptr ? engine_->transport(peer) : alone_;
  }
  bool takes_compute_units(int peer) const override {
    return engine_ != nullptr && engine_->takes_compute_units(peer);
  }
  bool has_lanes() const override { return engine_ != nullptr && engine_->has_lanes(); }
  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override;
  void WakeLinks() override {
    if (engine_ != nullptr) engine_->WakeLinks();
  }
  void LosePeer(int peer, const std::string& reason) override;
  void Abort(const std::string& reason) override;

 private:
  using Streams = std::array<cudaStream_t, kLanes>;

  StreamCommunicator(std::unique_ptr<TransferEngine> engine, std::string alone,
                     CudaEventPool* events, Streams streams, int rank, int world_size,
                     absl::Duration step_timeout);

  // Enqueues the group on the stream of its lane. If it fails with work possibly left on the
  // stream, it does not record the event's end, and sets *half_enqueued.
  absl::Status Enqueue(cudaStream_t stream, const std::vector<PeerTransfer>& group,
                       const std::vector<EventRef>& after, const std::shared_ptr<CudaEvent>& event,
                       bool* half_enqueued) ABSL_EXCLUSIVE_LOCKS_REQUIRED(issuing_);
  absl::Status CopyToSelf(cudaStream_t stream, const std::vector<PeerTransfer>& group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(issuing_);
  absl::Status ExchangeWithPeers(cudaStream_t stream, const std::vector<PeerTransfer>& group,
                                 const std::shared_ptr<GroupFailure>& failure)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(issuing_);

  void Watch();
  void EndWork();
  // Completes the events of an aborted ring, after its transfers have ended.
  void EndGroups() ABSL_EXCLUSIVE_LOCKS_REQUIRED(issuing_);
  absl::Status AbortedStatus() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<TransferEngine> engine_;
  const std::string alone_;
  CudaEventPool* const events_;
  const Streams streams_;  // by lane; all the same if the engine has no lanes
  const int rank_;
  const int world_size_;
  const absl::Duration step_timeout_;

  // Held while a group is enqueued. Acquired before mutex_.
  absl::Mutex issuing_;

  absl::Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::string reason_ ABSL_GUARDED_BY(mutex_);
  StepDeadlines steps_[kLanes] ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<CudaEvent>> pending_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<CudaEvent> half_enqueued_ ABSL_GUARDED_BY(mutex_);

  std::thread watcher_;  // last: uses the other members. Ends after an abort
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_STREAM_COMMUNICATOR_H_

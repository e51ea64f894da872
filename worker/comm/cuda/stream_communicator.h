// StreamCommunicator: groups of transfers between GPUs, in order, on a high-priority
// stream of their own, so that they run beside compute. An engine moves the bytes; what
// waits for what, deadlines and the end are here.
#ifndef RINGATTN_WORKER_COMM_CUDA_STREAM_COMMUNICATOR_H_
#define RINGATTN_WORKER_COMM_CUDA_STREAM_COMMUNICATOR_H_

#include <cuda_runtime_api.h>

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

// Thread safe, as Communicator says; its events are CudaEvents. Empty transfers are
// skipped by both sides. Within a group the n-th send of a rank to itself is copied to
// its n-th receive from itself.
// REQUIRES of every group: memory of the device; `after` are CudaEvents of the device or
// done.
class StreamCommunicator : public Communicator {
 public:
  // `engine` has joined its ring; null for a ring of one. `transport` is what it is called
  // by. INTERNAL if no stream can be made.
  static absl::StatusOr<std::unique_ptr<StreamCommunicator>> Create(
      std::unique_ptr<TransferEngine> engine, std::string transport, CudaEventPool* events,
      int rank, int world_size, absl::Duration step_timeout);
  ~StreamCommunicator() override;

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string transport() const override { return transport_; }
  bool takes_compute_units() const override {
    return engine_ != nullptr && engine_->takes_compute_units();
  }
  EventRef Start(std::vector<PeerTransfer> group, std::vector<EventRef> after,
                 RunControl* control) override;
  void WakeLinks() override {
    if (engine_ != nullptr) engine_->WakeLinks();
  }
  void Abort(const std::string& reason) override;

 private:
  StreamCommunicator(std::unique_ptr<TransferEngine> engine, std::string transport,
                     CudaEventPool* events, cudaStream_t stream, int rank, int world_size,
                     absl::Duration step_timeout);

  // Puts the group on the stream. After a failure that may have left work behind,
  // the event's end is not recorded and *half_enqueued is set.
  absl::Status Enqueue(const std::vector<PeerTransfer>& group, const std::vector<EventRef>& after,
                       CudaEvent* event, bool* half_enqueued)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(issuing_);
  absl::Status CopyToSelf(const std::vector<PeerTransfer>& group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(issuing_);
  absl::Status ExchangeWithPeers(const std::vector<PeerTransfer>& group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(issuing_);

  void Watch();
  void EndWork();
  // What is left of the groups of an aborted ring, whose transfers have come to an end.
  void EndGroups() ABSL_EXCLUSIVE_LOCKS_REQUIRED(issuing_);
  absl::Status AbortedStatus() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<TransferEngine> engine_;
  const std::string transport_;
  CudaEventPool* const events_;
  const cudaStream_t stream_;
  const int rank_;
  const int world_size_;
  const absl::Duration step_timeout_;

  // Held while a group is put on the stream. Before mutex_.
  absl::Mutex issuing_;

  absl::Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::string reason_ ABSL_GUARDED_BY(mutex_);
  StepDeadlines steps_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<CudaEvent>> pending_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<CudaEvent> half_enqueued_ ABSL_GUARDED_BY(mutex_);

  std::thread watcher_;  // last: uses the rest. Ends after an abort
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_STREAM_COMMUNICATOR_H_

// MixedEngine: transfers with some ranks by copy engines and with the others by a network engine,
// which is NCCL or sockets. A group is split by peer. Both parts start when the lane's stream
// reaches the group, the network's on a separate stream, so that neither waits for the other. The
// lane's stream continues when both are complete. Groups inside hosts, which copy engines move,
// therefore never wait for the network.
//
// Tests: mixed_faults_test.cc, mixed_rings_under_test.cc
#ifndef RINGATTN_WORKER_COMM_MIXED_MIXED_ENGINE_H_
#define RINGATTN_WORKER_COMM_MIXED_MIXED_ENGINE_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/cuda/transfer_engine.h"
#include "worker/device/cuda/cuda_event.h"

namespace ringattn::worker {

// Thread safe, as TransferEngine requires. Transfers with one peer keep their order, because one
// engine moves all of them.
class MixedEngine : public TransferEngine {
 public:
  //   by_copies  by rank: `copies` moves the transfers with it, else `network`. The entry of this
  //              rank itself is true.
  // Returns INTERNAL if the stream cannot be created. `events` must outlive the engine.
  static absl::StatusOr<std::unique_ptr<MixedEngine>> Create(
      std::unique_ptr<TransferEngine> copies, std::unique_ptr<TransferEngine> network,
      std::vector<bool> by_copies, CudaEventPool* events);
  ~MixedEngine() override;

  std::string transport(int peer) const override { return Engine(peer).transport(peer); }
  bool takes_compute_units(int peer) const override {
    return Engine(peer).takes_compute_units(peer);
  }
  bool has_lanes() const override { return true; }
  absl::Status Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream,
                       const std::shared_ptr<GroupFailure>& failure) override;
  void WakeLinks() override;
  // Returns false for peers of the copy engines.
  bool LosePeer(int peer, const std::string& reason) override {
    return !by_copies_[peer] && network_->LosePeer(peer, reason);
  }
  // Names the ranks that the failed engine serves.
  absl::Status AsyncError() override;
  void Interrupt() override;
  void Abort() override;

 private:
  MixedEngine(std::unique_ptr<TransferEngine> copies, std::unique_ptr<TransferEngine> network,
              std::vector<bool> by_copies, CudaEventPool* events);
  absl::Status MakeStreams();

  const TransferEngine& Engine(int peer) const { return by_copies_[peer] ? *copies_ : *network_; }
  absl::Status EnqueueNetwork(const std::vector<PeerTransfer>& group, const CudaEvent& reached,
                              cudaStream_t stream, const std::shared_ptr<GroupFailure>& failure);
  // Returns the network's stream for groups on a lane's stream.
  cudaStream_t NetworkStream(cudaStream_t stream);

  const std::unique_ptr<TransferEngine> copies_;
  const std::unique_ptr<TransferEngine> network_;
  const std::vector<bool> by_copies_;
  const std::string network_ranks_;  // for messages
  CudaEventPool* const events_;
  // One for each lane if the network engine has lanes, else one.
  std::vector<cudaStream_t> network_streams_;
  std::vector<cudaStream_t> lane_streams_;  // used by Enqueue only: in the order of first use

  absl::Mutex ending_;  // held during Abort
  bool ended_ ABSL_GUARDED_BY(ending_) = false;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_MIXED_MIXED_ENGINE_H_

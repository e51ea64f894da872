#include "worker/comm/mixed/mixed_engine.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/comm/mixed/ring_paths.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

// Returns, for example, "ranks 2, 3".
std::string RanksWithout(const std::vector<bool>& by_copies) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < by_copies.size(); ++rank) {
    if (!by_copies[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace

absl::StatusOr<std::unique_ptr<MixedEngine>> MixedEngine::Create(
    std::unique_ptr<TransferEngine> copies, std::unique_ptr<TransferEngine> network,
    std::vector<bool> by_copies, CudaEventPool* events) {
  std::unique_ptr<MixedEngine> engine(
      new MixedEngine(std::move(copies), std::move(network), std::move(by_copies), events));
  if (absl::Status status = engine->MakeStreams(); !status.ok()) return status;
  return engine;
}

absl::Status MixedEngine::MakeStreams() {
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  int lowest = 0, highest = 0;
  status = CudaStatus(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                      "cudaDeviceGetStreamPriorityRange");
  if (!status.ok()) return status;
  // High priority for NCCL's kernels, as in StreamCommunicator::Create.
  const size_t streams = network_->has_lanes() ? kLanes : 1;
  while (network_streams_.size() < streams) {
    cudaStream_t stream = nullptr;
    status = CudaStatus(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest),
                        "cudaStreamCreateWithPriority");
    if (!status.ok()) return status;
    network_streams_.push_back(stream);
  }
  return absl::OkStatus();
}

MixedEngine::MixedEngine(std::unique_ptr<TransferEngine> copies,
                         std::unique_ptr<TransferEngine> network, std::vector<bool> by_copies,
                         CudaEventPool* events)
    : copies_(std::move(copies)),
      network_(std::move(network)),
      by_copies_(std::move(by_copies)),
      network_ranks_(RanksWithout(by_copies_)),
      events_(events) {}

MixedEngine::~MixedEngine() {
  Abort();
  if (!events_->UseDevice().ok()) return;
  for (cudaStream_t stream : network_streams_) (void)cudaStreamDestroy(stream);
}

cudaStream_t MixedEngine::NetworkStream(cudaStream_t stream) {
  auto lane = std::find(lane_streams_.begin(), lane_streams_.end(), stream);
  if (lane == lane_streams_.end()) lane = lane_streams_.insert(lane, stream);
  return network_streams_[(lane - lane_streams_.begin()) % network_streams_.size()];
}

absl::Status MixedEngine::Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream,
                                  const std::shared_ptr<GroupFailure>& failure) {
  for (const PeerTransfer& transfer : group) {
    if (transfer.peer >= 0 && transfer.peer < static_cast<int>(by_copies_.size())) continue;
    return absl::InternalError(absl::StrCat("rank ", transfer.peer, " is not a peer of this ring"));
  }
  const SplitGroup split = SplitByPath(group, by_copies_);
  if (split.network.empty()) return copies_->Enqueue(split.copies, stream, failure);
  CudaEvent reached(events_, nullptr, 0);
  absl::Status status = reached.RecordEnd(stream);
  // Copies first: they take a few microseconds to enqueue, and NCCL's group some tens.
  if (status.ok() && !split.copies.empty()) {
    status = copies_->Enqueue(split.copies, stream, failure);
  }
  if (status.ok()) status = EnqueueNetwork(split.network, reached, stream, failure);
  return status;
}

absl::Status MixedEngine::EnqueueNetwork(const std::vector<PeerTransfer>& group,
                                         const CudaEvent& reached, cudaStream_t stream,
                                         const std::shared_ptr<GroupFailure>& failure) {
  const cudaStream_t network = NetworkStream(stream);
  absl::Status status = reached.MakeStreamWait(network);
  if (status.ok()) status = network_->Enqueue(group, network, failure);
  CudaEvent moved(events_, nullptr, 0);
  if (status.ok()) status = moved.RecordEnd(network);
  if (status.ok()) status = moved.MakeStreamWait(stream);
  return status;
}

void MixedEngine::WakeLinks() {
  copies_->WakeLinks();
  network_->WakeLinks();
}

absl::Status MixedEngine::AsyncError() {
  absl::Status status = copies_->AsyncError();
  if (!status.ok()) return status;
  status = network_->AsyncError();
  if (status.ok()) return status;
  return {status.code(), absl::StrCat("exchanging with ", network_ranks_, ": ", status.message())};
}

void MixedEngine::Interrupt() {
  copies_->Interrupt();
  network_->Interrupt();
}

void MixedEngine::Abort() {
  Interrupt();
  absl::MutexLock ending(&ending_);
  if (std::exchange(ended_, true)) return;
  // At the same time, because each needs the other. NCCL waits for its kernels, and those of later
  // groups wait for earlier copies. Copies wait for the ring's stream, which waits for NCCL.
  std::thread network([this] { network_->Abort(); });
  copies_->Abort();
  network.join();
  // The network's part of an incomplete group is not covered by the ring's stream.
  if (!events_->UseDevice().ok()) return;
  for (cudaStream_t stream : network_streams_) (void)cudaStreamSynchronize(stream);
}

}  // namespace ringattn::worker

#include "worker/comm/cuda/handshake.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

constexpr absl::Duration kPoll = absl::Milliseconds(5);

// Copies from or to pageable memory. Such a copy may return before the data has arrived, and the
// communicator's stream does not wait for the default stream.
absl::Status CopyNow(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  absl::Status status = CudaStatus(cudaMemcpy(to, from, bytes, kind), "cudaMemcpy");
  if (status.ok()) status = CudaStatus(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  return status;
}

}  // namespace

absl::Status Handshake(Communicator& communicator, void* memory, uint64_t generation,
                       absl::Time deadline, const std::atomic<bool>& cancelled) {
  const int world_size = communicator.world_size();
  const auto word = [generation](int rank) { return generation << 16 | rank; };
  std::vector<uint64_t> sent(world_size, word(communicator.rank())), received(world_size);
  const size_t bytes = world_size * sizeof(uint64_t);
  auto* outgoing = static_cast<uint64_t*>(memory);
  uint64_t* incoming = outgoing + world_size;
  absl::Status status = CopyNow(outgoing, sent.data(), bytes, cudaMemcpyHostToDevice);
  if (!status.ok()) return status;
  std::vector<PeerTransfer> group;
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == communicator.rank()) continue;
    group.push_back({Kind::kSend, peer, outgoing + peer, sizeof(uint64_t)});
    group.push_back({Kind::kReceive, peer, incoming + peer, sizeof(uint64_t)});
  }
  RunControl control;
  const EventRef done = communicator.Start(std::move(group), {}, &control);
  status = absl::DeadlineExceededError("");
  while (absl::IsDeadlineExceeded(status) && MonotonicNow() < deadline && !cancelled.load()) {
    status = done->Wait(std::min(deadline, MonotonicNow() + kPoll));
  }
  if (absl::IsDeadlineExceeded(status)) {
    communicator.Abort(cancelled.load() ? "cancelled" : "not all ranks took part in time");
    // The abort bounds the wait. `memory` and `control` are in use until then.
    status = done->Wait(absl::InfiniteFuture());
    if (status.ok())
      status = absl::UnavailableError("a peer did not complete the handshake in time");
  }
  if (status.ok()) status = CopyNow(received.data(), incoming, bytes, cudaMemcpyDeviceToHost);
  for (int peer = 0; peer < world_size && status.ok(); ++peer) {
    if (peer != communicator.rank() && received[peer] != word(peer)) {
      status = absl::UnavailableError(absl::StrCat("rank ", peer, " sent an unexpected handshake"));
    }
  }
  if (cancelled.load()) return absl::CancelledError("forming the ring was cancelled");
  return status;
}

}  // namespace ringattn::worker

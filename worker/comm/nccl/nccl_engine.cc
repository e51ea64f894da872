#include "worker/comm/nccl/nccl_engine.h"

#include "absl/time/time.h"

namespace ringattn::worker {
namespace {

// Time limit for enqueuing one group, which needs no peer.
constexpr absl::Duration kEnqueueBound = absl::Seconds(10);

}  // namespace

absl::Status NcclEngine::Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream,
                                 const std::shared_ptr<GroupFailure>&) {
  const NcclLibrary& nccl = comm_->library();
  return comm_->Group(
      [&](ncclComm_t comm) {
        for (const PeerTransfer& transfer : group) {
          const ncclResult_t result =
              transfer.kind == PeerTransfer::Kind::kSend
                  ? nccl.Send(transfer.data, transfer.bytes, ncclUint8, transfer.peer, comm, stream)
                  : nccl.Recv(transfer.data, transfer.bytes, ncclUint8, transfer.peer, comm,
                              stream);
          if (result != ncclSuccess && result != ncclInProgress) return result;
        }
        return ncclSuccess;
      },
      kEnqueueBound);
}

}  // namespace ringattn::worker

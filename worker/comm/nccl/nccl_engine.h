// NcclEngine: runs groups of transfers as groups of ncclSend and ncclRecv.
#ifndef RINGATTN_WORKER_COMM_NCCL_NCCL_ENGINE_H_
#define RINGATTN_WORKER_COMM_NCCL_NCCL_ENGINE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/comm/cuda/transfer_engine.h"
#include "worker/comm/nccl/nccl_comm.h"

namespace ringattn::worker {

// The name of the transport (Communicator::transport).
inline constexpr char kNcclTransport[] = "nccl";

// NCCL does not compare sizes, so a mismatch between ranks is not detected.
class NcclEngine : public TransferEngine {
 public:
  // `comm` has joined its ring and must have no other user.
  explicit NcclEngine(std::unique_ptr<NcclComm> comm) : comm_(std::move(comm)) {}

  std::string transport(int) const override { return kNcclTransport; }
  bool takes_compute_units(int) const override { return true; }
  absl::Status Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream,
                       const std::shared_ptr<GroupFailure>& failure) override;
  absl::Status AsyncError() override { return comm_->AsyncError(); }
  void Interrupt() override { comm_->Interrupt(); }
  void Abort() override { comm_->Abort(); }

 private:
  const std::unique_ptr<NcclComm> comm_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_NCCL_NCCL_ENGINE_H_

// TransferEngine: moves the bytes of a group between GPUs, by NCCL, copy engines or sockets.
#ifndef RINGATTN_WORKER_COMM_CUDA_TRANSFER_ENGINE_H_
#define RINGATTN_WORKER_COMM_CUDA_TRANSFER_ENGINE_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/comm/communicator.h"
#include "worker/comm/cuda/group_failure.h"

namespace ringattn::worker {

// Enqueue is called by one thread at a time, the other methods by any thread at any time. The
// device is current on the calling thread.
class TransferEngine {
 public:
  virtual ~TransferEngine() = default;

  // See Communicator. Constant. `peer`: a rank of the ring, also this one.
  virtual std::string transport(int peer) const = 0;
  virtual bool takes_compute_units(int peer) const = 0;
  virtual bool has_lanes() const { return false; }

  // Enqueues a group's transfers on `stream`, which is always the same for groups of one lane. All
  // have bytes and other ranks as peers. They run when the stream reaches them, and the stream
  // continues when all are complete. Does not wait for peers. After a failure, part of the group
  // may be enqueued, now or later, until Abort() has returned. `failure`: of the group, for engines
  // that keep peers apart.
  virtual absl::Status Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream,
                               const std::shared_ptr<GroupFailure>& failure) = 0;

  // See Communicator.
  virtual void WakeLinks() {}

  // Ends transfers with the peer, now and later, and returns true. Returns false if the engine does
  // not keep peers apart. See Communicator.
  virtual bool LosePeer(int /*peer*/, const std::string& /*reason*/) { return false; }

  // Returns asynchronous errors that the engine has noticed. Cheap.
  virtual absl::Status AsyncError() = 0;

  // Makes a current Enqueue() and later ones fail at once. Never blocks. Until Abort() has
  // returned, the stream may then continue before a group's transfers have ended. An Enqueue() that
  // still does not return may need another Interrupt().
  virtual void Interrupt() = 0;

  // Interrupts and ends everything enqueued, within a bound or by ending the process. Idempotent.
  virtual void Abort() = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_TRANSFER_ENGINE_H_

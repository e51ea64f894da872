// TransferEngine: what moves the bytes of a group between GPUs: NCCL, copy engines.
#ifndef RINGATTN_WORKER_COMM_CUDA_TRANSFER_ENGINE_H_
#define RINGATTN_WORKER_COMM_CUDA_TRANSFER_ENGINE_H_

#include <cuda_runtime_api.h>

#include <vector>

#include "absl/status/status.h"
#include "worker/comm/communicator.h"

namespace ringattn::worker {

// Enqueue comes from one thread at a time; the rest from any, at any time. The device is
// current on the calling thread.
class TransferEngine {
 public:
  virtual ~TransferEngine() = default;

  // As Communicator's. Constant.
  virtual bool takes_compute_units() const = 0;

  // Puts a group's transfers, all with bytes and with other ranks, on `stream`: they run
  // when the stream gets there, and it goes on when all of them have taken place. Always
  // the same stream. Waits for no peer. If it fails, part of the group may be enqueued, or
  // yet be, until Abort() has returned.
  virtual absl::Status Enqueue(const std::vector<PeerTransfer>& group, cudaStream_t stream) = 0;

  // As Communicator's.
  virtual void WakeLinks() {}

  // What has gone wrong since, as far as it shows by itself. Cheap.
  virtual absl::Status AsyncError() = 0;

  // Makes an Enqueue() in progress and later ones fail at once. Never blocks. From here on
  // the stream may go on before a group's transfers have come to an end: until Abort() has
  // returned. An Enqueue() that does not end may need it again.
  virtual void Interrupt() = 0;

  // Interrupt(), and ends what is enqueued, within a bound or with the process's end.
  // Idempotent.
  virtual void Abort() = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_TRANSFER_ENGINE_H_

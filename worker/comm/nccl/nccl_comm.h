// NcclComm: one NCCL communicator, created and ended within time limits.
#ifndef RINGATTN_WORKER_COMM_NCCL_NCCL_COMM_H_
#define RINGATTN_WORKER_COMM_NCCL_NCCL_COMM_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/nccl/nccl_library.h"
#include "worker/device/cuda/cuda_event.h"

namespace ringattn::worker {

struct NcclCommOptions {
  int rank = 0;
  int world_size = 1;
  int max_ctas = 4;
  absl::Duration abort_timeout = absl::Seconds(5);
  std::function<void(const std::string&)>
      on_stuck;  // may be null: Abort() then waits without limit
};

// Thread safe: calls exclude each other, and Interrupt() ends the one that is waiting. Always ended
// by ncclCommAbort, which needs no peer, unlike a graceful end.
class NcclComm {
 public:
  // Creates the communicator. Blocks until `deadline` or until *cancelled (polled) at most. Returns
  // UNAVAILABLE if not all ranks joined, or CANCELLED. `library` and `events` must live as long as
  // the process.
  static absl::StatusOr<std::unique_ptr<NcclComm>> Join(
      const NcclLibrary* library, CudaEventPool* events, const NcclCommOptions& options,
      const std::string& unique_id, absl::Time deadline, const std::atomic<bool>& cancelled);
  ~NcclComm();  // aborts

  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Runs `enqueue`, which calls ncclSend and ncclRecv, as one NCCL group, and waits until the group
  // is on its streams. That takes some tens of microseconds, because it does not wait for
  // transfers. Returns UNAVAILABLE if NCCL fails, after Interrupt(), or after `bound`. Part of the
  // group may then be enqueued, now or later, until Abort() has returned.
  absl::Status Group(const std::function<ncclResult_t(ncclComm_t)>& enqueue, absl::Duration bound);

  // Returns what NCCL has noticed, such as a lost network connection. NCCL does not notice the
  // death of a peer on the same host.
  absl::Status AsyncError();

  const NcclLibrary& library() const { return *library_; }

  // Makes a current Group() and later ones fail at once. Never blocks.
  void Interrupt() { interrupted_ = true; }

  // Interrupts and ends the kernels of all groups. Calls on_stuck if that takes longer than
  // abort_timeout. Idempotent.
  void Abort();

 private:
  NcclComm(const NcclLibrary* library, CudaEventPool* events, const NcclCommOptions& options)
      : library_(library), events_(events), options_(options) {}

  // Polls until NCCL has completed the last call, `deadline` passes or `stop` is set.
  absl::Status Settle(const char* call, absl::Time deadline, const std::atomic<bool>& stop)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const NcclLibrary* const library_;
  CudaEventPool* const events_;
  const NcclCommOptions options_;
  std::atomic<bool> interrupted_{false};
  absl::Mutex mutex_;
  ncclComm_t comm_ ABSL_GUARDED_BY(mutex_) = nullptr;  // null once aborted
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_NCCL_NCCL_COMM_H_

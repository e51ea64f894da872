// NcclComm: one NCCL communicator, made and ended within bounds.
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
  std::function<void(const std::string&)> on_stuck;  // may be null: then an end waits on
};

// Thread safe: calls exclude one another, and Interrupt() ends the one that waits.
// Always ended by ncclCommAbort, which needs no peer; a graceful end would.
class NcclComm {
 public:
  // Blocks at most until `deadline` or until *cancelled (polled). UNAVAILABLE if not all
  // ranks came, CANCELLED. `library` and `events` live as long as the process.
  static absl::StatusOr<std::unique_ptr<NcclComm>> Join(
      const NcclLibrary* library, CudaEventPool* events, const NcclCommOptions& options,
      const std::string& unique_id, absl::Time deadline, const std::atomic<bool>& cancelled);
  ~NcclComm();  // aborts

  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Runs `enqueue` (calls of ncclSend and ncclRecv) as one NCCL group and waits until it
  // is on its streams: a few tens of microseconds, since it does not wait for transfers.
  // UNAVAILABLE if NCCL refuses, after Interrupt(), or past `bound`. Then part of the
  // group may be enqueued, or yet be, until Abort() has returned.
  absl::Status Group(const std::function<ncclResult_t(ncclComm_t)>& enqueue, absl::Duration bound);

  // What NCCL has noticed by itself: a lost network connection, say. The death of a
  // peer on the same host it does not.
  absl::Status AsyncError();

  const NcclLibrary& library() const { return *library_; }

  // Makes a Group() in progress and later ones fail at once. Never blocks.
  void Interrupt() { interrupted_ = true; }

  // Interrupt(), and ends the kernels of all groups. If it takes longer than
  // abort_timeout, on_stuck is called. Idempotent.
  void Abort();

 private:
  NcclComm(const NcclLibrary* library, CudaEventPool* events, const NcclCommOptions& options)
      : library_(library), events_(events), options_(options) {}

  // Polls until the last call is done with. `stop` ends it.
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

#include "worker/comm/nccl/nccl_comm.h"

#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "worker/comm/nccl/nccl_blob.h"
#include "worker/comm/nccl/settle_pause.h"

namespace ringattn::worker {

absl::StatusOr<std::unique_ptr<NcclComm>> NcclComm::Join(
    const NcclLibrary* library, CudaEventPool* events, const NcclCommOptions& options,
    const std::string& unique_id, absl::Time deadline, const std::atomic<bool>& cancelled) {
  static_assert(sizeof(ncclUniqueId) == kNcclUniqueIdBytes);
  if (absl::Status status = events->UseDevice(); !status.ok()) return status;
  ncclUniqueId id;
  std::memcpy(&id, unique_id.data(), sizeof(id));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.minCTAs = 1;
  config.maxCTAs = options.max_ctas;
  // Clusters would need several free SMs of one GPC at once, while compute kernels free them one by
  // one.
  config.cgaClusterSize = 0;
  std::unique_ptr<NcclComm> made(new NcclComm(library, events, options));
  absl::Status status;
  {
    absl::MutexLock lock(&made->mutex_);
    const ncclResult_t result =
        library->CommInitRankConfig(&made->comm_, options.world_size, id, options.rank, &config);
    status = library->ToStatus(result, "ncclCommInitRankConfig", nullptr);
    if (status.ok()) status = made->Settle("ncclCommInitRankConfig", deadline, cancelled);
  }
  if (cancelled.load()) status = absl::CancelledError("forming the ring was cancelled");
  if (!status.ok()) return status;  // `made` aborts what has been started
  return made;
}

NcclComm::~NcclComm() { Abort(); }

absl::Status NcclComm::Settle(const char* call, absl::Time deadline,
                              const std::atomic<bool>& stop) {
  const absl::Time begin = MonotonicNow();
  while (true) {
    ncclResult_t state = ncclInProgress;
    const ncclResult_t result = library_->CommGetAsyncError(comm_, &state);
    if (absl::Status status = library_->ToStatus(result, "ncclCommGetAsyncError", comm_);
        !status.ok()) {
      return status;
    }
    if (state != ncclInProgress) return library_->ToStatus(state, call, comm_);
    if (stop.load()) return absl::UnavailableError(absl::StrCat(call, " was interrupted"));
    if (MonotonicNow() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat(call, " did not finish in time, because not all ranks took part"));
    }
    const absl::Duration pause = SettlePause(MonotonicNow() - begin);
    if (pause == absl::ZeroDuration()) {
      std::this_thread::yield();
    } else {
      absl::SleepFor(pause);
    }
  }
}

absl::Status NcclComm::Group(const std::function<ncclResult_t(ncclComm_t)>& enqueue,
                             absl::Duration bound) {
  absl::MutexLock lock(&mutex_);
  if (comm_ == nullptr || interrupted_.load()) {
    return absl::UnavailableError("the communicator was aborted");
  }
  absl::Status status = library_->ToStatus(library_->GroupStart(), "ncclGroupStart", comm_);
  if (!status.ok()) return status;
  const ncclResult_t enqueued = enqueue(comm_);
  // Always ends the group: it is thread state and would affect the next ring.
  const ncclResult_t ended = library_->GroupEnd();
  status = library_->ToStatus(enqueued, "ncclSend or ncclRecv", comm_);
  if (status.ok()) status = library_->ToStatus(ended, "ncclGroupEnd", comm_);
  if (!status.ok()) return status;
  return Settle("ncclGroupEnd", MonotonicNow() + bound, interrupted_);
}

absl::Status NcclComm::AsyncError() {
  absl::MutexLock lock(&mutex_);
  if (comm_ == nullptr) return absl::UnavailableError("the communicator was aborted");
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = library_->CommGetAsyncError(comm_, &state);
  absl::Status status = library_->ToStatus(result, "ncclCommGetAsyncError", comm_);
  return status.ok() ? library_->ToStatus(state, "NCCL", comm_) : status;
}

void NcclComm::Abort() {
  Interrupt();
  absl::MutexLock lock(&mutex_);
  if (comm_ == nullptr) return;
  absl::Notification returned;
  std::thread guard([&] {
    if (returned.WaitForNotificationWithTimeout(options_.abort_timeout)) return;
    if (options_.on_stuck) {
      options_.on_stuck(absl::StrCat("ncclCommAbort of rank ", options_.rank, " took longer than ",
                                     absl::FormatDuration(options_.abort_timeout)));
    }
  });
  (void)events_->UseDevice();
  (void)library_->CommAbort(std::exchange(comm_, nullptr));
  returned.Notify();
  guard.join();
}

}  // namespace ringattn::worker

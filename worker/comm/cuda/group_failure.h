// GroupFailure: how an engine fails one group of transfers while the ring goes on.
#ifndef RINGATTN_WORKER_COMM_CUDA_GROUP_FAILURE_H_
#define RINGATTN_WORKER_COMM_CUDA_GROUP_FAILURE_H_

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/cuda/cuda_event.h"

namespace ringattn::worker {

// Thread safe.
class GroupFailure {
 public:
  // A transfer of the group has failed. Must be called before the group's stream continues. The
  // first failure counts.
  void Report(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (!status_.ok()) return;
    status_ = status;
    if (event_ != nullptr) event_->Fail(status_);
  }

  // The end of the group has been recorded in `event`, which fails with the group.
  void Attach(std::shared_ptr<CudaEvent> event) {
    absl::MutexLock lock(&mutex_);
    event_ = std::move(event);
    if (!status_.ok()) event_->Fail(status_);
  }

 private:
  absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<CudaEvent> event_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_GROUP_FAILURE_H_

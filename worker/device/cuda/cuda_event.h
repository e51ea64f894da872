// CudaEvent: an Event on a CUDA stream: a pair of cudaEvent_t around the work, taken
// from a pool, so that a ring step creates nothing.
//
//   auto event = std::make_shared<CudaEvent>(pool, control, /*progress=*/1);
//   status = WaitOnStream(stream, after);
//   status = event->RecordBegin(stream);
//   ... enqueue ...
//   status = event->RecordEnd(stream);
//   if (!status.ok()) event->Fail(status);
//
// A step that fails after work was enqueued still records the end: only then does
// Done() say that nothing touches the operands any more.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_EVENT_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_EVENT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/device/device.h"
#include "worker/device/event.h"

namespace ringattn::worker {

// Timing events of one device, and what ties their clock to the host's. Lives as long
// as the process. Thread safe.
class CudaEventPool {
 public:
  // The device's pool, made on first use. INTERNAL if the device cannot be used.
  static absl::StatusOr<CudaEventPool*> ForDevice(int device);

  int device() const { return device_; }

  // Makes the device current on the calling thread. Every thread that talks to CUDA
  // does so first: a new thread's current device is 0, whatever the process uses.
  absl::Status UseDevice() const;

  // Ties the device's clock to the host's anew if that is long ago: elapsed times are
  // fp32 milliseconds, exact to 1 us over ten seconds only. Outside ring passes; takes
  // a millisecond at most, and keeps the old tie if the device is too busy.
  void Rebase();

  // Once a CUDA call has shown that the context is beyond repair ("sticky" errors), every
  // later call fails. `on_broken` is called at the first such error, on the thread that
  // met it; a worker process leaves then, and is replaced.
  void SetOnBroken(std::function<void(const std::string& what)> on_broken);
  void ReportBroken(const absl::Status& status);

 private:
  friend class CudaEvent;

  // A moment on both clocks.
  struct Reference {
    cudaEvent_t event = nullptr;
    absl::Time time;
  };

  explicit CudaEventPool(int device) : device_(device) {}
  absl::Status Init();
  absl::StatusOr<cudaEvent_t> Take();
  void Give(cudaEvent_t event);
  std::shared_ptr<const Reference> reference() const;

  const int device_;
  cudaStream_t clock_stream_ = nullptr;
  mutable absl::Mutex mutex_;
  std::vector<cudaEvent_t> free_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const Reference> reference_ ABSL_GUARDED_BY(mutex_);
  std::function<void(const std::string&)> on_broken_ ABSL_GUARDED_BY(mutex_);
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
};

// Thread safe. RecordBegin and RecordEnd come from one thread, before the event is
// shared; Fail from any.
class CudaEvent : public Event {
 public:
  // `progress` is added to control->progress when the work is first seen to have ended;
  // `control` (may be null) is not touched after that, so it may go once Done() or
  // Wait() said so. `pool` outlives everything.
  CudaEvent(CudaEventPool* pool, RunControl* control, int64_t progress);
  ~CudaEvent() override;

  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  // Before and after the work on `stream`, which is the pool's device's.
  absl::Status RecordBegin(cudaStream_t stream);
  absl::Status RecordEnd(cudaStream_t stream);

  // The host's verdict, the first counts: the event fails with `status`, at once if the
  // end was not recorded, else when the stream gets there. Without effect once done.
  void Fail(absl::Status status);
  // The same, but where the end was recorded the event is not done before LetGo() either:
  // for a stream that may get there before all that it stands for has ended.
  void FailAndHold(absl::Status status);
  void LetGo();

  bool Done() const override;
  // INTERNAL, naming the call, if CUDA reports an asynchronous error: then the pool's
  // on_broken has been called.
  absl::Status Wait(absl::Time deadline) const override;
  absl::Time begin_time() const override;
  absl::Time end_time() const override;

  // The verdict so far: OK while none is known.
  absl::Status failure() const;
  // True if the operation was told to stop and this work has not ended.
  bool stop_requested() const;
  // Makes later work on `stream` wait for the end of this one. Nothing to wait for if
  // the end was not recorded.
  absl::Status MakeStreamWait(cudaStream_t stream) const;
  // The same of its begin.
  absl::Status MakeStreamWaitForBegin(cudaStream_t stream) const;

 private:
  bool Poll() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finish() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Time TimeOf(cudaEvent_t event) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration ElapsedSinceBegin() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  CudaEventPool* const pool_;
  const int64_t progress_;
  const std::shared_ptr<const CudaEventPool::Reference> reference_;

  mutable absl::Mutex mutex_;
  cudaEvent_t begin_ ABSL_GUARDED_BY(mutex_) = nullptr;
  cudaEvent_t end_ ABSL_GUARDED_BY(mutex_) = nullptr;
  mutable RunControl* control_ ABSL_GUARDED_BY(mutex_);  // null once done
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  mutable bool done_ ABSL_GUARDED_BY(mutex_) = false;
  mutable absl::Status status_ ABSL_GUARDED_BY(mutex_);
  mutable absl::Time begin_time_ ABSL_GUARDED_BY(mutex_);
  mutable absl::Time end_time_ ABSL_GUARDED_BY(mutex_);
};

// Makes later work on `stream` wait for all of `after`, also for those that have failed.
// INTERNAL if one of them is no CudaEvent: on a GPU worker a programming error.
absl::Status WaitOnStream(cudaStream_t stream, const std::vector<EventRef>& after);

// The first failure among `after` that is known by now.
absl::Status KnownFailure(const std::vector<EventRef>& after);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_EVENT_H_

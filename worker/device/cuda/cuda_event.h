// CudaEvent: an Event on a CUDA stream: a pair of cudaEvent_t around the work, taken from a pool so
// that ring steps create no events.
//
//   auto event = std::make_shared<CudaEvent>(pool, control, /*progress=*/1);
//   status = WaitOnStream(stream, after);
//   status = event->RecordBegin(stream);
//   ... enqueue ...
//   status = event->RecordEnd(stream);
//   if (!status.ok()) event->Fail(status);
//
// A step that fails after work was enqueued must still record the end. Only then does Done() imply
// that nothing accesses the operands any more.
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

// The timing events of one device, and the mapping from its clock to the host's. Lives as long as
// the process. Thread safe.
class CudaEventPool {
 public:
  // Returns the device's pool, created on first use. Returns INTERNAL if the device cannot be used.
  static absl::StatusOr<CudaEventPool*> ForDevice(int device);

  int device() const { return device_; }

  // Makes the device current on the calling thread. Every thread must call this before it uses
  // CUDA, because a new thread's current device is 0.
  absl::Status UseDevice() const;

  // Renews the mapping between the clocks if it is old: elapsed times are fp32 milliseconds, which
  // are exact to 1 us for ten seconds only. Call it outside runs. Takes at most a millisecond, and
  // keeps the old mapping if the device is too busy.
  void Rebase();

  // After a "sticky" error the CUDA context is unusable and every later call fails. `on_broken` is
  // called once, on the thread that found the error. A worker process then exits and is restarted.
  void SetOnBroken(std::function<void(const std::string& what)> on_broken);
  void ReportBroken(const absl::Status& status);

 private:
  friend class CudaEvent;

  // One moment on both clocks.
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

// Thread safe. RecordBegin and RecordEnd must be called by one thread, before the event is shared.
// Fail may be called on any thread.
class CudaEvent : public Event {
 public:
  // When the work is first observed to have ended, adds `progress` to control->progress. `control`
  // (may be null) is not used after that, so it may be destroyed once Done() or Wait() has reported
  // the end. `pool` must outlive the event.
  CudaEvent(CudaEventPool* pool, RunControl* control, int64_t progress);
  ~CudaEvent() override;

  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  // Called before and after the work on `stream`, which must belong to the pool's device.
  absl::Status RecordBegin(cudaStream_t stream);
  absl::Status RecordEnd(cudaStream_t stream);

  // Fails the event with `status`; the first failure counts. If the end was not recorded, the event
  // is done at once, else when the stream gets there. No effect once done.
  void Fail(absl::Status status);
  // Like Fail. If the end was recorded, the event is in addition not done before ReleaseHold(). For
  // work that may continue after its stream has passed the recorded end.
  void FailAndHold(absl::Status status);
  void ReleaseHold();

  bool Done() const override;
  // Returns INTERNAL, with the name of the call, if CUDA reports an asynchronous error. The pool's
  // on_broken has then been called.
  absl::Status Wait(absl::Time deadline) const override;
  absl::Time begin_time() const override;
  absl::Time end_time() const override;

  // Returns the failure, or OK while none is known.
  absl::Status failure() const;
  // Returns true if the operation was stopped and this work has not ended.
  bool stop_requested() const;
  // Makes later work on `stream` wait for the end of this work. No effect if the end was not
  // recorded.
  absl::Status MakeStreamWait(cudaStream_t stream) const;
  // The same for the begin of this work.
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

// Makes later work on `stream` wait for all of `after`, including failed ones. Returns INTERNAL if
// one of them is not a CudaEvent, which is a programming error on a GPU worker.
absl::Status WaitOnStream(cudaStream_t stream, const std::vector<EventRef>& after);

// Returns the first failure among `after` that is known now.
absl::Status KnownFailure(const std::vector<EventRef>& after);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_EVENT_H_

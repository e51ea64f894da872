// HostEvent: an Event that host threads complete.
#ifndef RINGATTN_WORKER_DEVICE_HOST_EVENT_H_
#define RINGATTN_WORKER_DEVICE_HOST_EVENT_H_

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/device/event.h"

namespace ringattn::worker {

// Thread safe.
class HostEvent : public Event {
 public:
  // Marks the moment at which the work itself begins. Finish() does so if Begin() was not called.
  void Begin();

  // Completes the event. REQUIRES: called once.
  void Finish(absl::Status status);

  bool Done() const override;
  absl::Status Wait(absl::Time deadline) const override;
  absl::Time begin_time() const override;
  absl::Time end_time() const override;

 private:
  mutable absl::Mutex mutex_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  absl::Time begin_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time end_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_HOST_EVENT_H_

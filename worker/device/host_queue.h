// HostQueue: a stream on the host. Runs work in the order in which it was started, one item at a
// time, each item after the events it waits for. A thread of the queue does so, except for
// RunOrStart.
#ifndef RINGATTN_WORKER_DEVICE_HOST_QUEUE_H_
#define RINGATTN_WORKER_DEVICE_HOST_QUEUE_H_

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {

// Thread safe. The destructor waits for everything started. The events that work waits for must end
// within bounded time.
class HostQueue {
 public:
  // What to do if an event that the work waits for has failed.
  enum class OnFailure {
    kSkip,  // do not run; fail with the same status
    kRun,   // run anyway
  };

  explicit HostQueue(std::string thread_name);  // at most 15 characters
  ~HostQueue();

  HostQueue(const HostQueue&) = delete;
  HostQueue& operator=(const HostQueue&) = delete;

  // Never blocks.
  EventRef Start(std::function<absl::Status()> work, std::vector<EventRef> after,
                 OnFailure on_failure);

  // The same, but runs the work on this thread if it may begin at once. Then the event is done when
  // the function returns.
  EventRef RunOrStart(std::function<absl::Status()> work, std::vector<EventRef> after,
                      OnFailure on_failure);

  // Returns true while the work at the head waits for an event.
  bool waiting() const { return waiting_.load(std::memory_order_relaxed); }

 private:
  struct Item {
    std::function<absl::Status()> work;
    std::vector<EventRef> after;
    OnFailure on_failure;
    std::shared_ptr<HostEvent> event;
  };

  void Loop();
  void RunItem(Item item);

  absl::Mutex mutex_;
  std::deque<Item> items_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;  // a thread runs an item
  std::atomic<bool> waiting_{false};
  std::thread thread_;  // last: starts when the other members exist
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_HOST_QUEUE_H_

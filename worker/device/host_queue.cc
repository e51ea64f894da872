#include "worker/device/host_queue.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace ringattn::worker {

HostQueue::HostQueue(std::string thread_name) : thread_([this] { Loop(); }) {
  pthread_setname_np(thread_.native_handle(), thread_name.c_str());
}

HostQueue::~HostQueue() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  thread_.join();
}

EventRef HostQueue::Start(std::function<absl::Status()> work, std::vector<EventRef> after,
                          OnFailure on_failure) {
  auto event = std::make_shared<HostEvent>();
  absl::MutexLock lock(&mutex_);
  items_.push_back({std::move(work), std::move(after), on_failure, event});
  return event;
}

EventRef HostQueue::RunOrStart(std::function<absl::Status()> work, std::vector<EventRef> after,
                               OnFailure on_failure) {
  auto event = std::make_shared<HostEvent>();
  const bool ready =
      std::all_of(after.begin(), after.end(), [](const EventRef& each) { return each->Done(); });
  Item item{std::move(work), std::move(after), on_failure, event};
  {
    absl::MutexLock lock(&mutex_);
    if (!ready || busy_ || !items_.empty()) {
      items_.push_back(std::move(item));
      return event;
    }
    busy_ = true;
  }
  RunItem(std::move(item));
  absl::MutexLock lock(&mutex_);
  busy_ = false;
  return event;
}

void HostQueue::Loop() {
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !busy_ && (closing_ || !items_.empty());
  };
  while (true) {
    Item item;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_news));
      if (items_.empty()) return;
      item = std::move(items_.front());
      items_.pop_front();
      busy_ = true;
    }
    RunItem(std::move(item));
    absl::MutexLock lock(&mutex_);
    busy_ = false;
  }
}

void HostQueue::RunItem(Item item) {
  absl::Status status;
  for (const EventRef& event : item.after) {
    if (!event->Done()) waiting_.store(true, std::memory_order_relaxed);
    absl::Status predecessor = event->Wait(absl::InfiniteFuture());
    if (status.ok()) status = std::move(predecessor);
  }
  waiting_.store(false, std::memory_order_relaxed);
  item.after.clear();
  if (status.ok() || item.on_failure == OnFailure::kRun) {
    item.event->Begin();
    status = item.work();
  }
  // The closure may own references to buffers, so it is destroyed before the event is done.
  item.work = nullptr;
  item.event->Finish(std::move(status));
}

}  // namespace ringattn::worker

#include "server/edge/loop/core_loop.h"

#include <optional>
#include <utility>

#include "common/base/monotonic_time.h"

namespace ringattn::server {

CoreLoop::CoreLoop(CoordinatorConfig config, ActionSink* sink)
    : tick_interval_(config.tick_interval),
      sink_(sink),
      core_(config),
      planning_(PlanningOptionsOf(config.limits),
                [this](Planned planned) { Post(std::move(planned)); }) {}

CoreLoop::~CoreLoop() { Stop(); }

void CoreLoop::Start() {
  thread_ = std::thread([this] { Run(); });
}

void CoreLoop::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wakeup_.Notify();
  if (thread_.joinable()) thread_.join();
}

void CoreLoop::Post(Event event) { Push({std::move(event), nullptr, nullptr}, false); }

void CoreLoop::Post(Event event, std::function<void()> then) {
  Push({std::move(event), std::move(then), nullptr}, false);
}

bool CoreLoop::TryPost(RequestArrived event) {
  return Enqueue({std::move(event), nullptr, nullptr}, true);
}

void CoreLoop::PostAndHandle(std::vector<Event> events, std::function<void()> then) {
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    for (Event& event : events) queue_.push_back({std::move(event), nullptr, nullptr});
    queue_.back().then = std::move(then);
    queue_.back().then_after_events = true;
  }
  HandleQueued();
}

bool CoreLoop::Ask(std::function<void(const Coordinator&)> question) {
  return Push({Tick{}, nullptr, std::move(question)}, true);
}

bool CoreLoop::Enqueue(Item item, bool only_if_short) {
  absl::MutexLock lock(&mutex_);
  if (stopping_ || (only_if_short && queue_.size() >= kLongQueue)) return false;
  queue_.push_back(std::move(item));
  return true;
}

bool CoreLoop::Push(Item item, bool only_if_short) {
  if (!Enqueue(std::move(item), only_if_short)) return false;
  {
    absl::MutexLock lock(&mutex_);
    if (busy_) return true;  // that thread sees the item
  }
  wakeup_.Notify();
  return true;
}

void CoreLoop::HandleQueued() {
  std::deque<Item> items;  // destroyed when the core is free again
  Work work;
  for (int handled = 0;; ++handled) {
    absl::MutexLock lock(&mutex_);
    if (handled == 0) {
      if (busy_ || stopping_ || queue_.empty()) return;
      busy_ = true;
    } else if (handled == kMostOnCaller || queue_.empty()) {
      work.swap(after_events_);
      busy_ = false;
      if (stopping_ || !queue_.empty()) wakeup_.Notify();
      break;
    }
    items.push_back(std::move(queue_.front()));
    queue_.pop_front();
    mutex_.Unlock();
    Handle(items.back(), MonotonicNow());
    mutex_.Lock();
  }
  for (auto& each : work) each();
}

void CoreLoop::Run() {
  absl::Time next_tick = MonotonicNow();
  while (true) {
    std::deque<Item> items;
    Work work;
    wakeup_.WaitFor(next_tick - MonotonicNow());
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(
          +[](bool* busy) { return !*busy; }, &busy_));
      busy_ = true;
      items.swap(queue_);
      if (items.empty() && stopping_) return;
    }
    const absl::Time now = MonotonicNow();
    for (Item& item : items) Handle(item, now);
    if (now >= next_tick) {
      next_tick = now + tick_interval_;
      Handle(Tick{}, now);
      sink_->OnTick(now, core_);
    }
    {
      absl::MutexLock lock(&mutex_);
      work.swap(after_events_);
      busy_ = false;
      if (!queue_.empty()) wakeup_.Notify();
    }
    for (auto& each : work) each();
  }
}

void CoreLoop::Handle(Item& item, absl::Time now) {
  if (item.question) return item.question(core_);
  Handle(std::move(item.event), now);
  if (!item.then) return;
  if (item.then_after_events) return AfterEvents(std::move(item.then));
  item.then();
}

void CoreLoop::Handle(Event event, absl::Time now) {
  std::optional<Planned> known;
  for (Action& action : core_.Handle(std::move(event), now)) {
    if (auto* plan = std::get_if<PlanThis>(&action)) {
      if (known.has_value()) Post(*std::move(known));  // many plans: other events come in between
      known = planning_.Submit(std::move(*plan));
    } else if (const auto* cancel = std::get_if<CancelPlan>(&action)) {
      planning_.Cancel(cancel->stream);
    } else {
      sink_->CarryOut(std::move(action), core_);
    }
  }
  // A plan may ask for another one only for more workers, so this ends.
  if (known.has_value()) Handle(*std::move(known), now);
}

}  // namespace ringattn::server

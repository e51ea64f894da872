#include "server/edge/loop/core_loop.h"

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
  return Push({std::move(event), nullptr, nullptr}, true);
}

bool CoreLoop::Ask(std::function<void(const Coordinator&)> question) {
  return Push({Tick{}, nullptr, std::move(question)}, true);
}

bool CoreLoop::Push(Item item, bool only_if_short) {
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_ || (only_if_short && queue_.size() >= kLongQueue)) return false;
    queue_.push_back(std::move(item));
  }
  wakeup_.Notify();
  return true;
}

void CoreLoop::Run() {
  absl::Time next_tick = MonotonicNow();
  while (true) {
    std::deque<Item> items;
    wakeup_.WaitFor(next_tick - MonotonicNow());
    {
      absl::MutexLock lock(&mutex_);
      items.swap(queue_);
      if (items.empty() && stopping_) return;
    }
    const absl::Time now = MonotonicNow();
    for (Item& item : items) {
      if (item.question) {
        item.question(core_);
        continue;
      }
      Handle(std::move(item.event), now);
      if (item.then) item.then();
    }
    if (now >= next_tick) {
      next_tick = now + tick_interval_;
      Handle(Tick{}, now);
      sink_->OnTick(now, core_);
    }
  }
}

void CoreLoop::Handle(Event event, absl::Time now) {
  for (Action& action : core_.Handle(std::move(event), now)) {
    if (auto* plan = std::get_if<PlanThis>(&action)) {
      planning_.Submit(std::move(*plan));
    } else if (const auto* cancel = std::get_if<CancelPlan>(&action)) {
      planning_.Cancel(cancel->stream);
    } else {
      sink_->CarryOut(action, core_);
    }
  }
}

}  // namespace ringattn::server

// CoreLoop: the one thread that owns the Coordinator. RPC threads post events, it
// handles them one after another, hands the actions to an ActionSink, and ticks. Plans are made
// on threads beside it.
//
// The core's clock stands while what came until then is handled: however far this thread is
// behind, whoever has spoken has been heard before his silence is judged.
#ifndef RINGATTN_SERVER_EDGE_LOOP_CORE_LOOP_H_
#define RINGATTN_SERVER_EDGE_LOOP_CORE_LOOP_H_

#include <deque>
#include <functional>
#include <thread>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/core/coordinator.h"
#include "server/planning/planning_service.h"

namespace ringattn::server {

// Carries actions out, all but PlanThis and CancelPlan. Called on the core's thread; must not
// block.
class ActionSink {
 public:
  virtual ~ActionSink() = default;
  virtual void CarryOut(const Action& action, const Coordinator& core) = 0;
  // After each Tick event and its actions.
  virtual void OnTick(absl::Time now, const Coordinator& core) = 0;
};

// Thread safe. The queue is bounded: RequestArrived, which clients cause at will, is
// refused when it is long; every other event has a source that waits for an earlier
// one's handling (this loop's own tick is one) or posts a fixed number per stream.
class CoreLoop {
 public:
  // `sink` outlives the loop. The thread starts with Start().
  CoreLoop(CoordinatorConfig config, ActionSink* sink);
  ~CoreLoop();

  void Start();
  // Handles what is queued and ends the thread. Events posted later are dropped.
  void Stop();

  void Post(Event event);
  // Runs `then` on the core's thread once the event is handled.
  void Post(Event event, std::function<void()> then);
  // False, and nothing posted, if the queue is long.
  bool TryPost(RequestArrived event);
  // Runs `question` on the core's thread, between events. False if the queue is long.
  bool Ask(std::function<void(const Coordinator&)> question);
  PlanningStats planning_stats() const { return planning_.stats(); }

 private:
  static constexpr size_t kLongQueue = 4096;

  struct Item {
    Event event;
    std::function<void()> then;
    std::function<void(const Coordinator&)> question;  // if set, there is no event
  };

  void Run();
  void Handle(Event event, absl::Time now);
  bool Push(Item item, bool only_if_short);

  const absl::Duration tick_interval_;
  ActionSink* const sink_;
  Coordinator core_;  // the thread's own once it runs

  absl::Mutex mutex_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
  PlanningService planning_;  // ends before what it posts to
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_LOOP_CORE_LOOP_H_

// CoreLoop: a queue of events for the Coordinator, and the thread that handles them in order,
// passes the actions to an ActionSink, and ticks. RPC threads post events. While the core is idle,
// an RPC thread may handle a few events itself. Separate threads make plans.
//
// Writing a message to gRPC takes as long as the core takes for an event. The sink therefore passes
// such work to AfterEvents(), and other threads use the core while this work runs.
//
// The core's time is MonotonicNow(). The core's clock does not advance while queued events are
// handled. Messages that have arrived are therefore processed before any timeout is evaluated.
#ifndef RINGATTN_SERVER_EDGE_LOOP_CORE_LOOP_H_
#define RINGATTN_SERVER_EDGE_LOOP_CORE_LOOP_H_

#include <deque>
#include <functional>
#include <thread>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "server/core/coordinator.h"
#include "server/planning/planning_service.h"

namespace ringattn::server {

// Carries out actions, except PlanThis and CancelPlan. Called by one thread at a time, which is the
// core's or one that calls HandleQueued(). Must not block.
class ActionSink {
 public:
  virtual ~ActionSink() = default;
  virtual void CarryOut(Action action, const Coordinator& core) = 0;
  // Called after each Tick event and its actions.
  virtual void OnTick(absl::Time now, const Coordinator& core) = 0;
};

// Thread safe. The queue is bounded. RequestArrived, whose number clients control, is rejected when
// the queue is long. Every other event comes from a source that waits until an earlier event is
// handled, or that posts a fixed number per stream.
class CoreLoop {
 public:
  // `sink` must outlive the loop. Start() starts the thread.
  CoreLoop(CoordinatorConfig config, ActionSink* sink);
  ~CoreLoop();

  void Start();
  // Handles the queued events and ends the thread. Events posted later are dropped.
  void Stop();

  void Post(Event event);
  // Runs `then` on the core's thread after the event.
  void Post(Event event, std::function<void()> then);
  // Returns false, and posts nothing, if the queue is long. The caller must call HandleQueued() or
  // Wake() soon after.
  bool TryPost(RequestArrived event);
  // Handles a few queued events on this thread if the core is idle, which saves a change of
  // threads. The caller must hold no lock that carrying out an action takes.
  void HandleQueued();
  // Lets the core's thread handle queued events.
  void Wake() { wakeup_.Notify(); }
  // Posts the events and calls HandleQueued(). Runs `then` after the last one, as AfterEvents()
  // does. REQUIRES: there is an event.
  void PostAndHandle(std::vector<Event> events, std::function<void()> then);
  // Runs `work` soon, on the thread that uses the core now, once that thread no longer uses it.
  // Call within ActionSink::CarryOut() only. Work of one thread runs in the order of the calls, and
  // concurrently with later events.
  void AfterEvents(absl::AnyInvocable<void()> work) { after_events_.push_back(std::move(work)); }
  // Runs `question` on the core's thread between events. Returns false if the queue is long.
  bool Ask(std::function<void(const Coordinator&)> question);
  PlanningStats planning_stats() const { return planning_.stats(); }

 private:
  static constexpr size_t kLongQueue = 4096;

  struct Item {
    Event event;
    std::function<void()> then;
    std::function<void(const Coordinator&)> question;  // if set, there is no event
    bool then_after_events = false;
  };
  using Work = std::vector<absl::AnyInvocable<void()>>;

  // Items that HandleQueued() handles at most before it runs their work, so that it does not keep
  // its thread for long and the messages of the first do not wait for long: an item of a small
  // request takes about 20 us. Messages of items that are handled together leave together, which
  // costs less. Passing the rest to the core's thread costs a wake-up.
  static constexpr int kMostOnCaller = 16;

  void Run();
  void Handle(Item& item, absl::Time now);
  void Handle(Event event, absl::Time now);
  // Returns false if the loop is stopping, or if the queue is long and the item must find it short.
  bool Enqueue(Item item, bool only_if_short);
  bool Push(Item item, bool only_if_short);

  const absl::Duration tick_interval_;
  ActionSink* const sink_;
  // Used by the thread that has set busy_, once the loop runs.
  Coordinator core_;
  Work after_events_;

  Wakeup wakeup_;  // after each change of the fields below
  absl::Mutex mutex_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // A thread uses the core. It sees every event that is queued before it clears this.
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
  PlanningService planning_;  // destroyed before its receiver
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_LOOP_CORE_LOOP_H_

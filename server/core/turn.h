// Turn: the handling of one event: when it is, and what is to be done because of it. The
// core's parts share one, so that their actions keep the order in which they arose.
#ifndef RINGATTN_SERVER_CORE_TURN_H_
#define RINGATTN_SERVER_CORE_TURN_H_

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events.h"

namespace ringattn::server {

// Not thread safe.
class Turn {
 public:
  // Times never go backwards; one that does is taken for the newest.
  void Begin(absl::Time now) {
    if (now_ == absl::InfinitePast()) started_at_ = now;
    now_ = std::max(now_, now);
  }
  absl::Time now() const { return now_; }
  bool started() const { return now_ != absl::InfinitePast(); }
  absl::Time started_at() const { return started_at_; }

  void Emit(Action action) { actions_.push_back(std::move(action)); }
  // To be filled in before anything else is emitted.
  v1::JoinResponse* Send(ConnectionId connection) {
    Emit(SendToWorker{connection, {}});
    return &std::get<SendToWorker>(actions_.back()).message;
  }
  std::vector<Action> Take() { return std::exchange(actions_, {}); }

 private:
  absl::Time now_ = absl::InfinitePast();
  absl::Time started_at_ = absl::InfinitePast();
  std::vector<Action> actions_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TURN_H_

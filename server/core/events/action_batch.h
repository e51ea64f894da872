// ActionBatch: the handling of one event: when it is, and what is to be done because of it. The
// core's parts share one, so that their actions keep the order in which they arose.
#ifndef RINGATTN_SERVER_CORE_EVENTS_ACTION_BATCH_H_
#define RINGATTN_SERVER_CORE_EVENTS_ACTION_BATCH_H_

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/events.h"

namespace ringattn::server {

// Not thread safe.
class ActionBatch {
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
    newest_[connection] = actions_.size();
    Emit(SendToWorker{connection, {}});
    return &std::get<SendToWorker>(actions_.back()).message;
  }
  // Likewise; one message for all residuals that a worker is to drop with nothing said between
  // them: thousands may end in one batch, and a control stream takes so many messages only.
  v1::DropResiduals* SendDrop(ConnectionId connection) {
    const auto newest = newest_.find(connection);
    if (newest != newest_.end()) {
      v1::JoinResponse& message = std::get<SendToWorker>(actions_[newest->second]).message;
      if (message.has_drop_residuals()) return message.mutable_drop_residuals();
    }
    return Send(connection)->mutable_drop_residuals();
  }
  std::vector<Action> Take() {
    newest_.clear();
    return std::exchange(actions_, {});
  }

 private:
  absl::Time now_ = absl::InfinitePast();
  absl::Time started_at_ = absl::InfinitePast();
  std::vector<Action> actions_;
  std::map<ConnectionId, size_t> newest_;  // of actions_, to each worker
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_ACTION_BATCH_H_

// ActionBatch: the time and the resulting actions of one event. All components of the core share
// one batch, so that actions keep the order in which they were emitted.
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
  // Starts the handling of an event. Times must not decrease; an earlier time is replaced by the
  // newest one.
  void Begin(absl::Time now) {
    if (now_ == absl::InfinitePast()) started_at_ = now;
    now_ = std::max(now_, now);
  }
  absl::Time now() const { return now_; }
  bool started() const { return now_ != absl::InfinitePast(); }
  absl::Time started_at() const { return started_at_; }

  void Emit(Action action) { actions_.push_back(std::move(action)); }
  // Returns a message for the caller to fill in before it emits anything else.
  v1::JoinResponse* Send(ConnectionId connection) {
    newest_[connection] = actions_.size();
    Emit(SendToWorker{connection, {}});
    return &std::get<SendToWorker>(actions_.back()).message;
  }
  // Returns the DropResiduals message for this worker, to be filled in before anything else is
  // emitted. Consecutive drops for one worker share a message, because one batch may end thousands
  // of residuals and a control stream's queue is bounded.
  v1::DropResiduals* SendDrop(ConnectionId connection) {
    const auto newest = newest_.find(connection);
    if (newest != newest_.end()) {
      v1::JoinResponse& message = std::get<SendToWorker>(actions_[newest->second]).message;
      if (message.has_drop_residuals()) return message.mutable_drop_residuals();
    }
    return Send(connection)->mutable_drop_residuals();
  }
  // Returns the KvFree message with this reason for this worker, in the same way.
  v1::KvFree* SendKvFree(ConnectionId connection, const char* reason) {
    const auto newest = newest_.find(connection);
    if (newest != newest_.end()) {
      v1::JoinResponse& message = std::get<SendToWorker>(actions_[newest->second]).message;
      if (message.has_kv_free() && message.kv_free().reason() == reason) {
        return message.mutable_kv_free();
      }
    }
    v1::KvFree* free = Send(connection)->mutable_kv_free();
    free->set_reason(reason);
    return free;
  }
  std::vector<Action> Take() {
    newest_.clear();
    return std::exchange(actions_, {});
  }

 private:
  absl::Time now_ = absl::InfinitePast();
  absl::Time started_at_ = absl::InfinitePast();
  std::vector<Action> actions_;
  std::map<ConnectionId, size_t> newest_;  // index in actions_ of the last message to each worker
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_ACTION_BATCH_H_

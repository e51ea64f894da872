// StatusBoard: the newest snapshot of the coordinator for whoever looks at the live page.
//
// The core's thread makes one only when somebody waits for it, at most every `min_interval`
// however many look, and never waits itself. Nobody looks: nothing is made.
#ifndef RINGATTN_SERVER_EDGE_STATUS_STATUS_BOARD_H_
#define RINGATTN_SERVER_EDGE_STATUS_STATUS_BOARD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/core/events/snapshot.h"
#include "server/edge/data/data_plane.h"

namespace ringattn::server {

struct StatusBoardOptions {
  absl::Duration min_interval = absl::Milliseconds(250);
  // Requests that are shown one by one; all are counted.
  int64_t max_requests = 64;
  // More do not wait: while the core is stuck, half of the HTTP threads stay free for scrapes.
  int max_waiting = 8;
};

struct ServerStatus {
  CoordinatorSnapshot core;
  // Of core.requests, one each.
  std::vector<TransferTotals> transfers;
};

// Thread safe.
class StatusBoard {
 public:
  explicit StatusBoard(const StatusBoardOptions& options = {}) : options_(options) {}

  const StatusBoardOptions& options() const { return options_; }

  // From the core's thread: whether it is time to Publish().
  bool Wants(absl::Time now) const;
  void Publish(ServerStatus status, absl::Time now);

  // Waits for one that is newer than min_interval, at most for `patience` and with max_waiting
  // others; else the last one, however old it is. Null: there was none yet.
  std::shared_ptr<const ServerStatus> Look(absl::Duration patience);

 private:
  const StatusBoardOptions options_;
  mutable absl::Mutex mutex_;  // held for moments only
  std::shared_ptr<const ServerStatus> newest_ ABSL_GUARDED_BY(mutex_);
  absl::Time published_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_STATUS_STATUS_BOARD_H_

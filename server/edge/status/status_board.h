// StatusBoard: the newest snapshot of the coordinator, for viewers of the live page.
//
// The core's thread makes a snapshot only while a viewer waits for one, at most once per
// `min_interval` for all viewers, and never waits itself.
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
  // Requests that are listed individually; all are counted.
  int64_t max_requests = 64;
  // Bound on waiting viewers. While the core is stuck, half of the HTTP threads stay free for
  // metrics.
  int max_waiting = 8;
};

struct ServerStatus {
  CoordinatorSnapshot core;
  // One for each of core.requests.
  std::vector<TransferTotals> transfers;
};

// Thread safe.
class StatusBoard {
 public:
  explicit StatusBoard(const StatusBoardOptions& options = {}) : options_(options) {}

  const StatusBoardOptions& options() const { return options_; }

  // Called from the core's thread: returns whether Publish() is due.
  bool PublishIsDue(absl::Time now) const;
  void Publish(ServerStatus status, absl::Time now);

  // Waits at most `patience`, alongside at most max_waiting others, for a snapshot newer than
  // min_interval. Otherwise returns the last one, of any age; null if there is none.
  std::shared_ptr<const ServerStatus> Look(absl::Duration patience);

 private:
  const StatusBoardOptions options_;
  mutable absl::Mutex mutex_;  // held only briefly
  std::shared_ptr<const ServerStatus> newest_ ABSL_GUARDED_BY(mutex_);
  absl::Time published_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_STATUS_STATUS_BOARD_H_

// CoordinatorConfig: what the core is told once. Times between coordinator and workers are
// here; the limits of the service's surface are in common/base/limits.h.
#ifndef RINGATTN_SERVER_CORE_EVENTS_CONFIG_H_
#define RINGATTN_SERVER_CORE_EVENTS_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "common/base/limits.h"

namespace ringattn::server {

struct CoordinatorConfig {
  Limits limits;
  absl::Duration tick_interval = absl::Milliseconds(50);
  absl::Duration heartbeat_interval = absl::Seconds(1);
  // A connected worker that has not been heard of for this long is lost.
  absl::Duration heartbeat_timeout = absl::Seconds(5);
  // While an operation computes: no progress on any rank for this long, though
  // heartbeats arrive, marks the least advanced rank as stuck. The floor; grows
  // with the predicted step time (progress_factor times it, and Reserved.slowdown).
  absl::Duration progress_timeout = absl::Seconds(20);
  double progress_factor = 10.0;
  // A member that is heard of but takes none of the bytes that wait for it is lost after this.
  // Longer than a worker waits for staging memory (30 s) before it ends the transfer itself.
  // Within it a message must go: of the largest, 16 MiB, that is 0.3 MB/s.
  absl::Duration transfer_timeout = absl::Seconds(60);
  // Likewise one that sends none of a result, but results of clients that do not read may
  // have its staging memory until they idle out: so many download_idle_timeouts later. The
  // smallest staging pool has blocks for two downloads beside each other; the last of eight
  // (max_operations_per_worker) waits until three pairs have given theirs back.
  static constexpr int kStagingRounds = 3;
  // Prepare, Commit, Reserve and Release are answered within this or the worker is dropped.
  absl::Duration control_timeout = absl::Seconds(10);
  // After a report that the ring broke: evidence of who broke it is gathered for
  // this long. Longer than a heartbeat interval, so that silence counts.
  absl::Duration blame_window = absl::Milliseconds(1500);
  // Likewise for Teardown. With blame_window in all 5 s from detection until the
  // survivors are free.
  absl::Duration teardown_timeout = absl::Milliseconds(3500);
  // Wait this long for more workers before forming a ring with those present.
  absl::Duration forming_delay = absl::Milliseconds(300);
  // Requests wait this long for a ring, then fail with UNAVAILABLE.
  absl::Duration ring_wait_max = absl::Seconds(30);
  // After a loss, requests for as many workers as there were are told for this long
  // to try again (UNAVAILABLE), not that they ask for too many.
  absl::Duration replacement_time_max = absl::Seconds(30);
  // The same from the start, whatever they ask for: the workers of a restarted
  // coordinator do not all come back in the same moment.
  absl::Duration assembly_time_max = absl::Seconds(3);
  // While a newcomer waits for the ring to become idle, new requests are held back
  // for at most this long, so that it can join under steady load.
  absl::Duration newcomer_hold_max = absl::Seconds(10);
  // What clients are told to wait before they try again.
  absl::Duration retry_after = absl::Seconds(1);
  // Operations that hold memory on one worker at a time: one computes while others
  // upload and download, and a slow client occupies one place only.
  int max_operations_per_worker = 8;
  // Of these, so many (a quarter) are express: for requests that cost far less than what
  // computes there, and for whoever comes while nothing computes there and has no place, one per
  // client. Large requests, or clients that hardly upload, cannot take them all.
  int express_operations_per_worker() const { return max_operations_per_worker / 4; }
  // A run is sent to workers that compute only if they will be done so soon: workers keep
  // the order in which runs come, and a small one must be able to go before the next large
  // one. Longer than the way to a worker and back, so that small runs follow each other
  // without a gap.
  absl::Duration run_ahead_max = absl::Milliseconds(50);
  // A run that takes longer than predicted by this factor, and longer than the floor, is
  // ended: what a client occupies is what its share of the queue was charged for.
  double run_time_factor = 20.0;
  absl::Duration run_time_floor = absl::Minutes(10);
  // A Backward that consumed a residual may be sent again for so long, should its answer have
  // been lost: longer than a client library tries.
  absl::Duration residual_replay_time = absl::Seconds(60);
  // The first generation is above this: derive it from the start time, so that a
  // restarted coordinator never repeats a number.
  uint64_t initial_generation = 0;
  // Workers of another version are turned away. Empty: any is taken.
  std::string version;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_CONFIG_H_

// CoordinatorConfig: the core's settings, fixed at construction. It holds the timing between
// coordinator and workers; limits on requests are in common/base/limits.h.
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
  // A connected worker that has sent nothing for this long is lost.
  absl::Duration heartbeat_timeout = absl::Seconds(5);
  // While an operation computes, a rank is stuck if no rank makes progress for this long although
  // heartbeats arrive; the least advanced rank is blamed. This is the minimum: the limit grows with
  // the predicted step time (progress_factor times it) and with Reserved.slowdown.
  absl::Duration progress_timeout = absl::Seconds(20);
  double progress_factor = 10.0;
  // A live member that accepts none of the bytes queued for it is lost after this time. It is
  // longer than the 30 s that a worker waits for staging memory before it ends the transfer itself.
  // One message, at most 16 MiB, must pass within it, which requires 0.3 MB/s.
  absl::Duration transfer_timeout = absl::Seconds(60);
  // The same for a member that sends no result bytes, plus this many download_idle_timeouts.
  // Results of clients that do not read may occupy a member's staging memory until those clients
  // reach the idle timeout. The smallest staging pool has blocks for two concurrent downloads, so
  // the last of eight (max_operations_per_worker) waits for three pairs.
  static constexpr int kStagingRounds = 3;
  // A worker must answer Prepare, Commit and Release within this time or it is dropped.
  absl::Duration control_timeout = absl::Seconds(10);
  // A request fails if a worker does not answer its Reserve within control_timeout plus this many
  // times the planning time, because workers make the same plan again. The worker is not dropped.
  double reserve_factor = 10.0;
  // Time to gather evidence after a report that the ring broke. Longer than a heartbeat interval,
  // so that silence can be observed.
  absl::Duration blame_window = absl::Milliseconds(1500);
  // Time to answer Teardown. Together with blame_window, survivors are free 5 s after detection.
  absl::Duration teardown_timeout = absl::Milliseconds(3500);
  // Operations without a lost member may run for this long until their generation ends. 0: they end
  // with the loss.
  absl::Duration loss_drain_timeout = absl::Seconds(10);
  // Such operations end earlier if workers that served a lost operation write into client memory
  // for longer than this, because its client gets the failure only after they have stopped.
  static constexpr absl::Duration kStopCopyingTime = absl::Seconds(1);
  // Time to wait for more workers before a ring is formed.
  absl::Duration forming_delay = absl::Milliseconds(300);
  // Hosts that could not reach each other are probed this often, with this limit for a connection,
  // which leaves time for one repeated packet.
  absl::Duration probe_interval = absl::Seconds(5);
  absl::Duration probe_timeout = absl::Seconds(2);
  // If rings over two hosts fail again and again although probes succeed, the first probe after a
  // failure waits twice as long each time, at most this long.
  absl::Duration parted_retry_max = absl::Minutes(5);
  // Requests wait this long for a ring, then fail with UNAVAILABLE.
  absl::Duration ring_wait_max = absl::Seconds(30);
  // For this long after a loss, requests for as many workers as the ring had fail with UNAVAILABLE
  // (retry) rather than with "too many workers".
  absl::Duration replacement_time_max = absl::Seconds(30);
  // The same after the start, for any number of workers, because the workers of a restarted
  // coordinator reconnect over a period of time.
  absl::Duration assembly_time_max = absl::Seconds(3);
  // Longest time for which new requests are held back so that the ring becomes idle and a newcomer
  // can join under steady load.
  absl::Duration newcomer_hold_max = absl::Seconds(10);
  // RetryInfo sent to clients.
  absl::Duration retry_after = absl::Seconds(1);
  // Operations that may hold memory on one worker at a time. One computes while others upload or
  // download, and a slow client occupies only one slot.
  int max_operations_per_worker = 8;
  // A quarter of these slots are express slots. Requests that cost far less than the running work
  // may take them. A client without any slot may take one while the worker is idle, at most one per
  // client. Large requests and clients that hardly upload therefore cannot occupy all slots.
  int express_operations_per_worker() const { return max_operations_per_worker / 4; }
  // A run is sent to a busy worker only if the worker is predicted to be idle within this time.
  // Workers execute runs in arrival order, so a run that is sent early blocks cheaper ones that
  // arrive later. The value exceeds one round trip to a worker, so small runs follow each other
  // without a gap.
  absl::Duration run_ahead_max = absl::Milliseconds(50);
  // A small request on one worker preempts a run there that is predicted to take longer than this.
  // The run then computes for at least this long before it gives way again.
  absl::Duration preempt_after = absl::Milliseconds(5);
  // Small enough to preempt: a predicted run of at most this long, and of at most an eighth of the
  // run that it preempts. The peers of that run wait meanwhile, so the value is far below every
  // limit on progress and transfers.
  absl::Duration preempting_run_max = absl::Milliseconds(500);
  static constexpr double kPreemptingRatio = 8;
  // A run that exceeds its prediction by this factor and also exceeds the minimum is ended, because
  // the client's share was charged for the prediction.
  double run_time_factor = 20.0;
  absl::Duration run_time_floor = absl::Minutes(10);
  // A Backward that consumed a residual may be repeated for this long, in case its answer was lost.
  // Longer than a client library retries.
  absl::Duration residual_replay_time = absl::Seconds(60);
  // K/V caches of an earlier coordinator are lost unless all their ranks register within this time.
  // Workers keep caches for as long without a coordinator.
  absl::Duration kv_orphan_time = absl::Seconds(60);
  // Generations start above this. Derive it from the start time so that a restarted coordinator
  // never repeats a number.
  uint64_t initial_generation = 0;
  // Workers of another version are rejected. Empty: any version is accepted.
  std::string version;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_CONFIG_H_

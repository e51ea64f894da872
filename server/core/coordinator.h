// The coordinator as a pure state machine: membership, two-phase ring forming, admission, the order
// of runs, and failure detection.
//
//   Coordinator core(config);
//   for (const Action& action : core.Handle(event, now)) CarryOut(action);
//
// Not thread safe: one thread (server/edge/loop/core_loop) feeds it. Tests: server/core/scenarios.
#ifndef RINGATTN_SERVER_CORE_COORDINATOR_H_
#define RINGATTN_SERVER_CORE_COORDINATOR_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/config.h"
#include "server/core/events/events.h"
#include "server/core/events/kv_events.h"
#include "server/core/events/operation_view.h"
#include "server/core/events/residual_view.h"
#include "server/core/events/snapshot.h"

namespace ringattn::server {

// Gauges for metrics.
struct CoordinatorStats {
  int64_t queued_requests = 0;
  int64_t queued_bytes = 0;
  int64_t active_requests = 0;
  int64_t reserved_bytes = 0;
  int64_t finished_bytes = 0;  // memory of the records of operations that ended
  uint64_t generation = 0;
  int64_t ring_reforms = 0;
  // Workers evicted because they accepted no upload bytes, or sent no result bytes.
  int64_t stalled_uploads = 0;
  int64_t stalled_downloads = 0;
  int64_t outlived_losses = 0;  // requests that succeeded after the loss of another ring member
  ResidualCounts residuals;
  KvCacheCounts kv_caches;
  int64_t regions = 0;        // regions of local memory that clients have attached
  int ready_workers = 0;      // members of the ring; 0 unless the ring is ready
  int connected_workers = 0;  // including workers outside the ring
  int parted_workers = 0;     // outside the ring because they cannot reach its members
  // For tests: FairOrder::steps(), which shows how much work the waiting requests cause.
  int64_t order_steps = 0;
};

class Coordinator {
 public:
  explicit Coordinator(CoordinatorConfig config);
  ~Coordinator();

  // Applies one event and returns the resulting actions, in order. Times must not decrease. `now`
  // is the time up to which every received message has been handled, so that a message that waits
  // in a queue is not mistaken for silence.
  std::vector<Action> Handle(Event event, absl::Time now);

  v1::Topology topology() const;
  CoordinatorStats stats() const;
  // Returns the state of everything for operators, with at most `max_requests` of the requests in
  // flight. Takes about 50 ns per request in flight.
  CoordinatorSnapshot Snapshot(int64_t max_requests) const;
  // Returns operations in flight and the last Limits::finished_operations_kept that ended; nullopt
  // for an unknown request.
  std::optional<OperationView> FindOperation(const std::string& request_id,
                                             const std::string& principal) const;
  // Resolves the residual that a Backward's header names. `request_id` is the Backward's, because a
  // retry of the same request may read a consumed residual; empty if it has none.
  ResidualView FindResidual(const std::string& handle, const std::string& principal,
                            const std::string& request_id) const;
  // Returns caches that exist and those that ended recently.
  KvCacheView FindKvCache(const std::string& id, const std::string& principal) const;
  // Returns at most `count` of the caller's caches in order of ids, after the id `after`.
  std::vector<v1::KvCacheInfo> ListKvCaches(const std::string& principal, const std::string& client,
                                            const std::string& after, int count) const;
  // Checks a StepHello on the relay.
  KvWriterView FindKvWriter(const std::string& id, const std::string& principal, uint64_t epoch,
                            const std::string& token) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_COORDINATOR_H_

// The coordinator as a pure state machine: membership, two-phase ring forming,
// admission, the one order of operations, failure detection.
//
//   Coordinator core(config);
//   for (const Action& action : core.Handle(event, now)) CarryOut(action);
//
// Not thread safe: one thread (server/edge/loop/core_loop) feeds it.
#ifndef RINGATTN_SERVER_CORE_COORDINATOR_H_
#define RINGATTN_SERVER_CORE_COORDINATOR_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/config.h"
#include "server/core/events/events.h"
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
  int64_t finished_bytes = 0;  // memory of what is known of operations that ended
  uint64_t generation = 0;
  int64_t ring_reforms = 0;
  // Workers lost because they took none of an upload's bytes, or sent none of a result's.
  int64_t stalled_uploads = 0;
  int64_t stalled_downloads = 0;
  ResidualCounts residuals;
  int64_t regions = 0;        // of host memory that clients share
  int ready_workers = 0;      // members of the ring, 0 unless it is ready
  int connected_workers = 0;  // of the ring or not
};

class Coordinator {
 public:
  explicit Coordinator(CoordinatorConfig config);
  ~Coordinator();

  // Times never go backwards. `now` is when everything is known that was said until then: what
  // waits to be handled is nobody's silence.
  std::vector<Action> Handle(Event event, absl::Time now);

  v1::Topology topology() const;
  CoordinatorStats stats() const;
  // For operators: everything at a glance, at most `max_requests` of the requests in flight.
  // Time grows with all that are in flight, by some 50 ns each.
  CoordinatorSnapshot Snapshot(int64_t max_requests) const;
  // Operations in flight and the last Limits::finished_operations_kept that ended.
  std::optional<OperationView> FindOperation(const std::string& request_id,
                                             const std::string& principal) const;
  // For the header of a Backward that names a residual. request_id: the Backward's, as it may be
  // one that is sent again; empty: it has none.
  ResidualView FindResidual(const std::string& handle, const std::string& principal,
                            const std::string& request_id) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_COORDINATOR_H_

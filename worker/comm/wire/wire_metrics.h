// Exports the state of rings over sockets to Prometheus.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_METRICS_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_METRICS_H_

#include <memory>

#include "common/observability/metrics.h"
#include "worker/comm/wire/wire_counters.h"

namespace ringattn::worker {

// Exports these series, whose values are read at each scrape:
//   ringattn_worker_wire_bytes_total{direction}     out, in
//   ringattn_worker_wire_connections                open now
//   ringattn_worker_wire_retries_total
//   ringattn_worker_wire_lost_peers_total{reason}   WireFailureName
//   ringattn_worker_wire_refused_total{reason}      the same
void ExportWire(Metrics* metrics, std::shared_ptr<const WireCounters> counters);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_METRICS_H_

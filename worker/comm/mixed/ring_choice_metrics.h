// Exports to Prometheus what carries the bytes of a GPU ring between hosts.
#ifndef RINGATTN_WORKER_COMM_MIXED_RING_CHOICE_METRICS_H_
#define RINGATTN_WORKER_COMM_MIXED_RING_CHOICE_METRICS_H_

#include <atomic>
#include <memory>

#include "common/observability/metrics.h"
#include "worker/comm/mixed/network_choice.h"

namespace ringattn::worker {

// The engine of the last ring that formed or tried to.
using LastNetworkEngine = std::atomic<NetworkEngine>;

// Exports ringattn_worker_ring_network{engine}, with engine none, nccl or wire: 1 for the engine of
// the last ring, else 0.
void ExportRingChoice(Metrics* metrics, std::shared_ptr<const LastNetworkEngine> last);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_MIXED_RING_CHOICE_METRICS_H_

// Housekeeping: periodic checks of the coordinator's descriptors, connections and memory.
#ifndef RINGATTN_SERVER_EDGE_HOUSEKEEPING_H_
#define RINGATTN_SERVER_EDGE_HOUSEKEEPING_H_

#include <atomic>
#include <cstdint>
#include <thread>

#include "absl/time/time.h"
#include "common/base/limits.h"
#include "common/base/monotonic_time.h"
#include "common/observability/metrics.h"
#include "common/wire/listener_metrics.h"

namespace ringattn::server {

struct HousekeepingOptions {
  absl::Duration interval = absl::Seconds(2);
  // Freed memory that malloc keeps for the next burst: 32 MiB in each of up to eight arenas
  // (common/wire/allocator). Above the first figure it is returned to the kernel while no request
  // exists, above the second figure always.
  int64_t max_free_bytes_idle = 64 * kMiB;
  int64_t max_free_bytes = kGiB;
};

// Thread safe.
class Housekeeping {
 public:
  // Starts a thread. `metrics` and the listeners must outlive this object.
  Housekeeping(const HousekeepingOptions& options, Metrics* metrics,
               const wire::ListenerMetrics::Listeners& listeners);
  ~Housekeeping();

  // Sets whether requests are queued or served.
  void SetBusy(bool busy) { busy_ = busy; }

 private:
  void Run();
  void Look();

  const HousekeepingOptions options_;
  std::atomic<bool> busy_ = false;
  wire::ListenerMetrics listeners_;  // used by the thread only
  prometheus::Gauge* open_descriptors_;
  prometheus::Gauge* resident_bytes_;
  prometheus::Counter* trims_;
  Wakeup stop_;
  std::thread thread_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_HOUSEKEEPING_H_

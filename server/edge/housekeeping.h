// Housekeeping: what the coordinator looks at every few seconds: its descriptors,
// connections and memory.
#ifndef RINGATTN_SERVER_EDGE_HOUSEKEEPING_H_
#define RINGATTN_SERVER_EDGE_HOUSEKEEPING_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "common/observability/metrics.h"
#include "common/wire/grpc_1_51/listener.h"

namespace ringattn::server {

struct HousekeepingOptions {
  absl::Duration interval = absl::Seconds(2);
  // What malloc keeps free for the next burst: 32 MiB in each of up to eight arenas
  // (common/wire/allocator). Beyond it the kernel gets it back when no request is there,
  // and from the second figure on, in any case.
  int64_t max_free_bytes_idle = 64 * kMiB;
  int64_t max_free_bytes = kGiB;
};

// Thread safe.
class Housekeeping {
 public:
  using Listeners = std::vector<std::pair<std::string, wire::Listener*>>;  // by name

  // `metrics` and the listeners outlive it. Starts a thread.
  Housekeeping(const HousekeepingOptions& options, Metrics* metrics, Listeners listeners);
  ~Housekeeping();

  // Whether requests wait or are served.
  void SetBusy(bool busy) { busy_ = busy; }

 private:
  struct Port {
    wire::Listener* listener;
    prometheus::Gauge* connections;
    prometheus::Counter* refused;
    prometheus::Counter* failed_accepts;
    wire::ListenerStats seen;  // what the counters have counted
  };

  void Run();
  void Look();

  const HousekeepingOptions options_;
  std::atomic<bool> busy_ = false;
  std::vector<Port> ports_;  // the thread's
  prometheus::Gauge* open_descriptors_;
  prometheus::Gauge* resident_bytes_;
  prometheus::Counter* trims_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_HOUSEKEEPING_H_

// Liveness: whether this process still answers at its own port.
//
// Metrics and the core go on when a listener is dead, so nothing else would notice.
#ifndef RINGATTN_SERVER_EDGE_LIVENESS_H_
#define RINGATTN_SERVER_EDGE_LIVENESS_H_

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringattn::server {

struct LivenessOptions {
  absl::Duration interval = absl::Seconds(5);
  absl::Duration probe_timeout = absl::Seconds(5);
  absl::Duration unhealthy_after = absl::Seconds(10);  // of failures without a success
  absl::Duration dead_after = absl::Seconds(30);       // likewise
};

// Thread safe.
class Liveness {
 public:
  struct Handlers {
    // Asks once; blocks for the timeout at most.
    std::function<absl::Status(absl::Duration timeout)> probe;
    // Not alive any more, with the last failure, or alive again (OK).
    std::function<void(const absl::Status& why)> on_change;
    // Not to be mended from within. Called once.
    std::function<void(const absl::Status& why)> on_dead;
  };

  // Asks at once and then at each interval, on a thread of its own, which calls the handlers.
  Liveness(const LivenessOptions& options, Handlers handlers);
  ~Liveness();  // no handler is called after it

 private:
  void Run();

  const LivenessOptions options_;
  const Handlers handlers_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_LIVENESS_H_

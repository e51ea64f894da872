// Liveness: checks that this process answers on its public port.
//
// Metrics and the core keep running when a listener is dead, so no other check would detect it.
#ifndef RINGATTN_SERVER_EDGE_LIVENESS_H_
#define RINGATTN_SERVER_EDGE_LIVENESS_H_

#include <functional>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"

namespace ringattn::server {

struct LivenessOptions {
  absl::Duration interval = absl::Seconds(5);
  absl::Duration probe_timeout = absl::Seconds(5);
  absl::Duration unhealthy_after = absl::Seconds(10);  // of failures without a success
  absl::Duration dead_after = absl::Seconds(30);       // of failures without a success
};

// Thread safe.
class Liveness {
 public:
  struct Handlers {
    // Sends one probe; blocks for at most `timeout`.
    std::function<absl::Status(absl::Duration timeout)> probe;
    // The port stopped answering (the last failure) or answers again (OK).
    std::function<void(const absl::Status& why)> on_change;
    // The process cannot recover. Called once.
    std::function<void(const absl::Status& why)> on_dead;
  };

  // Starts a thread that probes immediately and then at each interval, and calls the handlers.
  Liveness(const LivenessOptions& options, Handlers handlers);
  ~Liveness();  // no handler is called afterwards

 private:
  void Run();

  const LivenessOptions options_;
  const Handlers handlers_;
  Wakeup stop_;
  std::thread thread_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_LIVENESS_H_

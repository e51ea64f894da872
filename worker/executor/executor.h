// The executor: interprets one rank's Program (common/program/program.h). It knows the
// device and the communicator only by their interfaces, and nothing of what a
// particular schedule means.
#ifndef RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_
#define RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/executor/operation.h"

namespace ringattn::worker {

// One bar of the timeline.
struct TimelineBar {
  // kWait: the device waited for an exchange.
  enum class Kind : uint8_t { kCompute, kExchange, kWait };
  std::string name;  // "step 3 forward"
  Kind kind = Kind::kCompute;
  absl::Time begin;
  absl::Time end;
  KernelName kernel;  // kCompute: that served the call; empty: it multiplies no q by k
};

// Calls of one name that one kernel served.
struct KernelUse {
  const char* call = "";  // OpName: "forward", "backward", "bias_gradient", "probabilities"
  KernelName kernel;
  int64_t calls = 0;
};

struct ExecutionReport {
  absl::Time begin;
  absl::Time end;
  absl::Duration compute_time;    // inside compute calls
  absl::Duration ring_wait_time;  // the device stood idle between calls
  absl::Duration exchange_time;   // of transfers, from begin to end, added up
  // The part of exchange_time during which a compute call ran here.
  absl::Duration hidden_exchange_time;
  int64_t sent_bytes = 0;
  std::string transport;  // of the sent bytes: Communicator::transport
  int64_t tiles = 0;
  std::vector<KernelUse> kernels;     // in the order of their first calls
  std::vector<TimelineBar> timeline;  // if asked for
};

struct ExecuteOptions {
  bool with_timeline = false;
  // Steps enqueued ahead of the oldest unfinished one.
  int steps_ahead = 3;
  // Inputs may still be on their way: whatever touches one runs behind these.
  std::vector<EventRef> uploads;
};

// Runs the operation to its end on the calling thread. Inputs must be filled; of those
// being uploaded it is enough that options.uploads has their events.
// `communicator` may be null for a program without transfers.
//   CANCELLED    control().stop was set; all transfers have taken place
//   UNAVAILABLE  a transfer failed
// The step being executed is visible to other threads in *current_step (may be null).
absl::StatusOr<ExecutionReport> Execute(Operation& operation, Device& device,
                                        Communicator* communicator, const ExecuteOptions& options,
                                        std::atomic<int64_t>* current_step);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_

// The executor: interprets one rank's Program (common/program/program.h). It uses the device and
// the communicator through their interfaces only and is independent of the schedule.
//
// A step's transfers are one group per lane (common/program/lane.h). A group waits for earlier
// items only if their bytes conflict with its own, so a slow transfer between hosts delays neither
// the lane inside the host nor calls that do not need it.
#ifndef RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_
#define RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/executor/operation.h"

namespace ringattn::worker {

// One bar of the timeline of a report.
struct TimelineBar {
  // kWait: the device waited for an exchange.
  enum class Kind : uint8_t { kCompute, kExchange, kWait };
  std::string name;  // "step 3 forward"
  Kind kind = Kind::kCompute;
  absl::Time begin;
  absl::Time end;
  KernelName kernel;  // kCompute: the kernel that ran; empty for calls without q·k products
};

// Calls of one name that one kernel computed.
struct KernelUse {
  const char* call = "";  // OpName: "forward", "backward", "bias_gradient", "probabilities"
  KernelName kernel;
  int64_t calls = 0;
};

struct ExecutionReport {
  absl::Time begin;
  absl::Time end;
  absl::Duration compute_time;    // sum over compute calls
  absl::Duration ring_wait_time;  // the device was idle between calls
  absl::Duration exchange_time;   // sum over groups of both lanes, each from begin to end
  // The portion of exchange_time during which a compute call ran on this rank.
  absl::Duration hidden_exchange_time;
  int64_t sent_bytes = 0;
  std::map<std::string, int64_t> sent_by_transport;  // the same by Communicator::transport
  int64_t tiles = 0;
  std::vector<KernelUse> kernels;     // in the order of their first calls
  std::vector<TimelineBar> timeline;  // if requested
};

struct ExecuteOptions {
  bool with_timeline = false;
  // How many steps may be enqueued ahead of the oldest unfinished one. A group of transfers between
  // hosts counts as part of the first step that depends on it.
  int steps_ahead = 3;
  // Pending uploads of inputs. Every access to an input waits for them.
  std::vector<EventRef> uploads;
};

// Runs the operation to its end on the calling thread. Inputs must be filled or covered by
// options.uploads. `communicator` may be null for a program without transfers. Errors:
//   CANCELLED    control().stop was set; all transfers have still taken place
//   UNAVAILABLE  a transfer failed
//
// Publishes the current step in *current_step (may be null), for other threads to read.
absl::StatusOr<ExecutionReport> Execute(Operation& operation, Device& device,
                                        Communicator* communicator, const ExecuteOptions& options,
                                        std::atomic<int64_t>* current_step);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_

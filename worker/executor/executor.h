// The executor: interprets one rank's Program (common/schedule.h). It knows the
// device and the communicator only by their interfaces, and nothing of what a
// particular schedule means.
#ifndef RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_
#define RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/attention_spec.h"
#include "common/schedule.h"
#include "common/shard_plan.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"

namespace ringattn {

// What one rank needs to run: an immutable description and its memory.
class Operation {
 public:
  // Allocates every buffer of the program. RESOURCE_EXHAUSTED leaves nothing behind.
  //   members: generation ranks by ring rank; members[ring_rank] is this worker.
  static absl::StatusOr<std::unique_ptr<Operation>> Create(AttentionSpec spec, ShardPlan plan,
                                                           Program program,
                                                           std::vector<int> members,
                                                           Device* device);

  const AttentionSpec& spec() const { return spec_; }
  const ShardPlan& plan() const { return plan_; }
  const Program& program() const { return program_; }
  const std::vector<int>& members() const { return members_; }

  // The buffer of an input or output tensor, null if the program has none. This
  // rank's shard lies at its beginning; the buffer may be larger, where a program
  // uses it again for other blocks.
  DeviceBuffer* InputBuffer(TensorId id);
  DeviceBuffer* OutputBuffer(TensorId id);
  // Bytes of this rank's shard of a tensor.
  int64_t ShardBytes(TensorId id) const;
  void* Address(BufferId id) const { return buffers_[id]->data(); }

  RunControl& control() { return control_; }

 private:
  Operation() = default;

  AttentionSpec spec_;
  ShardPlan plan_;
  Program program_;
  std::vector<int> members_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  RunControl control_;
};

// One bar of the timeline.
struct TimelineBar {
  std::string name;      // "step 3 forward"
  std::string category;  // "compute", "exchange", "wait"
  absl::Time begin;
  absl::Time end;
};

struct ExecutionReport {
  absl::Time begin;
  absl::Time end;
  absl::Duration compute_time;    // inside compute calls
  absl::Duration ring_wait_time;  // the device stood idle between calls
  int64_t sent_bytes = 0;
  int64_t tiles = 0;
  std::vector<TimelineBar> timeline;  // if asked for
};

struct ExecuteOptions {
  bool with_timeline = false;
  // Steps enqueued ahead of the oldest unfinished one.
  int steps_ahead = 3;
};

// Runs the operation to its end on the calling thread. Inputs must be filled.
// `communicator` may be null for a program without transfers.
//   CANCELLED    control().stop was set; all transfers have taken place
//   UNAVAILABLE  a transfer failed
// The step being executed is visible to other threads in *current_step (may be null).
absl::StatusOr<ExecutionReport> Execute(Operation& operation, Device& device,
                                        Communicator* communicator, const ExecuteOptions& options,
                                        std::atomic<int64_t>* current_step);

}  // namespace ringattn

#endif  // RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_

// The executor: interprets one rank's Program (common/plan/schedule.h). It knows the
// device and the communicator only by their interfaces, and nothing of what a
// particular schedule means.
#ifndef RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_
#define RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/attention/attention_spec.h"
#include "common/plan/schedule.h"
#include "common/plan/shard_plan.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/executor/hazard_tracker.h"

namespace ringattn::worker {

struct BindContext;  // bind_call.h

// A compute call of a program, bound to the operation's memory and made ready.
struct ReadyCall {
  const PreparedCall* call = nullptr;
  std::vector<Access> accesses;  // what it reads and writes
  std::string name;              // "forward", "backward", ...
};

// What one rank needs to run: an immutable description, its memory and its calls.
class Operation {
 public:
  // Allocates every buffer of the program and makes its calls ready, so that running it
  // allocates nothing. RESOURCE_EXHAUSTED leaves nothing behind.
  //   members: generation ranks by ring rank; members[ring_rank] is this worker.
  static absl::StatusOr<std::unique_ptr<Operation>> Create(AttentionSpec spec, ShardPlan plan,
                                                           Program program,
                                                           std::vector<int> members,
                                                           Device* device);
  // What Create takes on `device` beside the program's buffers.
  static absl::StatusOr<int64_t> WorkspaceBytes(const AttentionSpec& spec, const ShardPlan& plan,
                                                const Program& program, const Device& device);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

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
  // Null before the buffers are there.
  void* Address(BufferId id) const { return buffers_.empty() ? nullptr : buffers_[id]->data(); }
  // The calls of a step, in order.
  const std::vector<ReadyCall>& ReadyCalls(int64_t step) const { return ready_[step]; }

  RunControl& control() { return control_; }

 private:
  Operation(AttentionSpec spec, ShardPlan plan, Program program, std::vector<int> members);
  // Fills ready_ but for the prepared calls, which the result becomes.
  std::vector<KernelCall> Bind();

  AttentionSpec spec_;
  ShardPlan plan_;
  Program program_;
  std::vector<int> members_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  std::unique_ptr<const BindContext> context_;
  PreparedCalls prepared_;
  std::vector<std::vector<ReadyCall>> ready_;  // by step
  RunControl control_;
};

// One bar of the timeline.
struct TimelineBar {
  // kWait: the device waited for an exchange.
  enum class Kind : uint8_t { kCompute, kExchange, kWait };
  std::string name;  // "step 3 forward"
  Kind kind = Kind::kCompute;
  absl::Time begin;
  absl::Time end;
};

struct ExecutionReport {
  absl::Time begin;
  absl::Time end;
  absl::Duration compute_time;    // inside compute calls
  absl::Duration ring_wait_time;  // the device stood idle between calls
  int64_t sent_bytes = 0;
  std::string transport;  // of the sent bytes: Communicator::transport
  int64_t tiles = 0;
  std::vector<TimelineBar> timeline;  // if asked for
};

struct ExecuteOptions {
  bool with_timeline = false;
  // Steps enqueued ahead of the oldest unfinished one.
  int steps_ahead = 3;
  // Inputs may still be on their way: whatever touches one runs behind these.
  std::vector<EventRef> uploads;
};

// Runs the operation to its end on the calling thread. Inputs must be filled.
// `communicator` may be null for a program without transfers.
//   CANCELLED    control().stop was set; all transfers have taken place
//   UNAVAILABLE  a transfer failed
// The step being executed is visible to other threads in *current_step (may be null).
absl::StatusOr<ExecutionReport> Execute(Operation& operation, Device& device,
                                        Communicator* communicator, const ExecuteOptions& options,
                                        std::atomic<int64_t>* current_step);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_EXECUTOR_H_

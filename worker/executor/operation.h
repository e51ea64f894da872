// Operation: one rank's share of one request, ready to run: program, memory and prepared calls.
// executor.h runs it.
#ifndef RINGATTN_WORKER_EXECUTOR_OPERATION_H_
#define RINGATTN_WORKER_EXECUTOR_OPERATION_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/program/access.h"
#include "common/program/lane.h"
#include "common/program/program.h"
#include "worker/device/device.h"

namespace ringattn::worker {

struct BindContext;  // bind_call.h

// A compute call of a program, bound to the operation's memory and prepared.
struct ReadyCall {
  const PreparedCall* call = nullptr;
  std::vector<Access> accesses;  // ranges that it reads and writes
  // Those of them that its step and the following ones may still be receiving, by step.
  std::vector<std::vector<Access>> late_reads;
  const char* name = "";  // "forward", "backward", ...
  // It may begin while the call before it, in program order, ends (StartAfter::overlaps_previous).
  bool overlaps_previous = false;
};

// Memory for one buffer of a program that outlives the operation: a residual of an earlier
// operation, or memory that keeps this operation's result.
struct LentBuffer {
  BufferId buffer = kNoBuffer;
  std::shared_ptr<DeviceBuffer> memory;  // on the operation's device
};

// When received keys arrive, relative to the start of their step. By default, kernels never wait
// for keys.
struct KeyArrival {
  struct InLane {
    double bytes_per_second = 0;  // 0: transfers use compute units or are too slow to wait for
    absl::Duration delay;         // fixed part of the transfer time
  };
  std::array<InLane, kLanes> lanes = {};
  // By generation rank: transfers with it use compute units, so no kernel waits for keys of a step
  // that has such a transfer. Ranks beyond the end: copy engines.
  std::vector<bool> takes_compute_units = {};

  const InLane& In(Lane lane) const { return lanes[IndexOf(lane)]; }
  // Return whether a kernel may wait for keys of the lane, or of any lane.
  bool may_be_late(Lane lane) const { return In(lane).bytes_per_second > 0; }
  bool may_be_late() const { return may_be_late(Lane::kInside) || may_be_late(Lane::kBetween); }
};

// Not thread safe, except for control().
class Operation {
 public:
  // Binds the program's calls. Merges calls whose keys may arrive late (late_keys.h), so program()
  // may differ from the argument; deterministic requests keep their calls. A lent buffer becomes
  // kRetained: it is neither allocated nor uploaded.
  //   members  generation ranks by ring rank; members[ring_rank] is this worker
  //   device   must outlive the operation
  //   arrival  when keys arrive that a kernel may wait for
  //
  // Returns INVALID_ARGUMENT if the device has no kernel for a call, or if a lent buffer is not in
  // the program, is too small, or is an input that the program would overwrite.
  static absl::StatusOr<std::unique_ptr<Operation>> Bind(AttentionSpec spec, ShardPlan plan,
                                                         Program program, std::vector<int> members,
                                                         Device* device,
                                                         std::vector<LentBuffer> lent = {},
                                                         KeyArrival arrival = {});
  // Allocates the buffers and prepares the calls, so that running them allocates nothing. Call
  // once. After RESOURCE_EXHAUSTED the operation must be destroyed.
  absl::Status Allocate();
  // Binds and allocates.
  static absl::StatusOr<std::unique_ptr<Operation>> Create(AttentionSpec spec, ShardPlan plan,
                                                           Program program,
                                                           std::vector<int> members, Device* device,
                                                           std::vector<LentBuffer> lent = {},
                                                           KeyArrival arrival = {});
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  const AttentionSpec& spec() const { return spec_; }
  const ShardPlan& plan() const { return plan_; }
  const Program& program() const { return program_; }
  const std::vector<int>& members() const { return members_; }

  // What Allocate takes: buffer_bytes for buffers that are not lent, workspace_bytes for kernels.
  int64_t buffer_bytes() const;
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // Returns the buffer of an input or output tensor, or null if the program has none. This rank's
  // shard is at its beginning; the buffer is larger if the program reuses it for other blocks.
  // REQUIRES: allocated.
  DeviceBuffer* InputBuffer(TensorId id);
  DeviceBuffer* OutputBuffer(TensorId id);
  // Returns the same buffer with shared ownership, so that it can outlive the operation. REQUIRES:
  // allocated.
  std::shared_ptr<DeviceBuffer> ShareBuffer(TensorId id) const;
  // Returns the bytes of this rank's shard of a tensor.
  int64_t ShardBytes(TensorId id) const;
  // REQUIRES: allocated.
  void* Address(const ByteRange& range) const {
    char* base = static_cast<char*>(buffers_[range.buffer]->data());
    return base == nullptr ? nullptr : base + range.offset;
  }
  // Returns the calls of a step, in order. REQUIRES: allocated.
  const std::vector<ReadyCall>& ReadyCalls(int64_t step) const { return ready_[step]; }

  RunControl& control() { return control_; }

 private:
  Operation(AttentionSpec spec, ShardPlan plan, Program program, std::vector<int> members,
            Device* device);
  void JoinLateKeys(const KeyArrival& arrival);
  // Sets ReadyCall::overlaps_previous. REQUIRES: the calls are prepared.
  void FindOverlaps();
  absl::Status Lend(std::vector<LentBuffer> lent);
  bool Overwrites(BufferId buffer) const;

  AttentionSpec spec_;
  ShardPlan plan_;
  Program program_;
  std::vector<int> members_;
  Device* const device_;
  std::vector<std::shared_ptr<DeviceBuffer>> buffers_;  // null until lent or allocated
  std::unique_ptr<const BindContext> context_;
  std::vector<KernelCall> described_;  // in program order, until they are prepared
  int64_t workspace_bytes_ = 0;
  PreparedCalls prepared_;
  std::vector<std::vector<ReadyCall>> ready_;  // by step
  RunControl control_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_OPERATION_H_

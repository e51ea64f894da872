// Operation: one rank's part of one request, ready to run: its program, its memory and
// its calls. executor.h runs it.
#ifndef RINGATTN_WORKER_EXECUTOR_OPERATION_H_
#define RINGATTN_WORKER_EXECUTOR_OPERATION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "worker/device/device.h"
#include "worker/executor/hazard_tracker.h"

namespace ringattn::worker {

struct BindContext;  // bind_call.h

// A compute call of a program, bound to the operation's memory and made ready.
struct ReadyCall {
  const PreparedCall* call = nullptr;
  std::vector<Access> accesses;    // what it reads and writes
  std::vector<Access> late_reads;  // of these, what its step's transfers may still bring
  const char* name = "";           // "forward", "backward", ...
};

// Memory that outlives the operation, for one buffer of its program: what an earlier
// operation left (residuals, a session's keys), or where this one leaves something.
struct LentBuffer {
  BufferId buffer = kNoBuffer;
  std::shared_ptr<DeviceBuffer> memory;  // of the operation's device
};

// When what a step receives is there, from the step's begin. By default kernels are never asked to
// wait for it.
struct KeyArrival {
  double bytes_per_second = 0;  // 0: transfers need units that compute, or are too slow
  absl::Duration delay;         // beside their bytes

  bool may_be_late() const { return bytes_per_second > 0; }
};

// Not thread safe, but for control().
class Operation {
 public:
  // Binds the program's calls, some of them joined where keys may come late (late_keys.h), so that
  // program() differs then from what was given; of a deterministic request none. The buffer of each
  // lent one becomes kRetained: nothing is allocated for it and nobody uploads to it.
  //   members: generation ranks by ring rank; members[ring_rank] is this worker
  //   device   outlives the operation
  //   arrival  when keys come that a call's kernel waits for
  // INVALID_ARGUMENT: calls that the device has no kernel for; a lent buffer that the
  // program does not have, that is smaller than the program needs, or an input that it
  // would overwrite.
  static absl::StatusOr<std::unique_ptr<Operation>> Bind(AttentionSpec spec, ShardPlan plan,
                                                         Program program, std::vector<int> members,
                                                         Device* device,
                                                         std::vector<LentBuffer> lent = {},
                                                         KeyArrival arrival = {});
  // Allocates the buffers and makes the calls ready, so that running them allocates
  // nothing. Once. RESOURCE_EXHAUSTED: the operation is good for nothing any more.
  absl::Status Allocate();
  // Both.
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

  // What Allocate takes: for buffers, but for lent ones, and for kernels beside them.
  int64_t buffer_bytes() const;
  int64_t workspace_bytes() const { return workspace_bytes_; }

  // The buffer of an input or output tensor, null if the program has none. This
  // rank's shard lies at its beginning; the buffer may be larger, where a program
  // uses it again for other blocks. REQUIRES: allocated.
  DeviceBuffer* InputBuffer(TensorId id);
  DeviceBuffer* OutputBuffer(TensorId id);
  // The buffer of an input or output tensor, to outlive the operation; null if there is none.
  // REQUIRES: allocated.
  std::shared_ptr<DeviceBuffer> ShareBuffer(TensorId id) const;
  // Bytes of this rank's shard of a tensor.
  int64_t ShardBytes(TensorId id) const;
  // REQUIRES: allocated.
  void* Address(const ByteRange& range) const {
    char* base = static_cast<char*>(buffers_[range.buffer]->data());
    return base == nullptr ? nullptr : base + range.offset;
  }
  // The calls of a step, in order. REQUIRES: allocated.
  const std::vector<ReadyCall>& ReadyCalls(int64_t step) const { return ready_[step]; }

  RunControl& control() { return control_; }

 private:
  Operation(AttentionSpec spec, ShardPlan plan, Program program, std::vector<int> members,
            Device* device);
  void JoinLateKeys();
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

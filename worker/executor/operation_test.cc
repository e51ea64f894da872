// Operations: lent memory, and what operations request from the device. The sweep (tests/) checks
// computed values.
#include "worker/executor/operation.h"

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/schedule/schedule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/executor/executor.h"
#include "worker/testing/scalar_device.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kTokens = 12;
constexpr int64_t kDim = 4;

AttentionSpec Spec() {
  AttentionSpec spec;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = kTokens;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, kTokens};
  spec.shape.head_dim = spec.shape.head_dim_v = kDim;
  spec.options.causal = true;
  return spec;
}

ShardPlan OneRank() { return MakeShardPlan(Spec(), Layout::kContiguous, 1); }

Program ProgramOf(Direction direction, bool recompute_forward) {
  return MakeProgram(Spec(), OneRank(),
                     RecipeOn(OneRank(), ScheduleKind::kSingle, direction, recompute_forward), 0);
}

BufferId BufferOf(const Program& program, TensorId id) {
  for (size_t i = 0; i < program.buffers.size(); ++i) {
    if (program.buffers[i].input == id || program.buffers[i].output == id) return i;
  }
  return kNoBuffer;
}

std::vector<float> Ramp(TensorId id) {
  std::vector<float> values(kTokens * kDim);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = 0.1f * static_cast<float>((i * 7 + static_cast<size_t>(id) * 3) % 11) - 0.5f;
  }
  return values;
}

// Fills the inputs that a client would upload, runs the operation and returns the outputs.
std::map<TensorId, std::vector<float>> RunToEnd(Operation& operation, Device& device) {
  for (const BufferSpec& buffer : operation.program().buffers) {
    if (buffer.source != BufferSource::kUpload) continue;
    const std::vector<float> values = Ramp(*buffer.input);
    EXPECT_TRUE(device
                    .CopyFromHost(operation.InputBuffer(*buffer.input)->data(), values.data(),
                                  operation.ShardBytes(*buffer.input))
                    .ok());
  }
  EXPECT_TRUE(Execute(operation, device, nullptr, {}, nullptr).ok());
  std::map<TensorId, std::vector<float>> outputs;
  for (const BufferSpec& buffer : operation.program().buffers) {
    if (!buffer.output.has_value()) continue;
    std::vector<float>& values = outputs[*buffer.output];
    values.resize(operation.ShardBytes(*buffer.output) / sizeof(float));
    EXPECT_TRUE(device
                    .CopyToHost(values.data(), operation.OutputBuffer(*buffer.output)->data(),
                                operation.ShardBytes(*buffer.output))
                    .ok());
  }
  return outputs;
}

std::shared_ptr<DeviceBuffer> Memory(Device& device, int64_t bytes) {
  return std::shared_ptr<DeviceBuffer>(*device.Allocate(bytes));
}

// A forward leaves out and lse in memory that outlives it. A backward borrows them, and nothing is
// uploaded for them.
TEST(Operation, LentBuffersCarryResidualsBetweenOperations) {
  CpuDevice device(/*threads=*/1, /*memory_limit_bytes=*/1 << 20);
  Program backward = ProgramOf(Direction::kBackward, false);
  const int64_t out_bytes = backward.buffers[BufferOf(backward, TensorId::kOut)].bytes;
  const int64_t lse_bytes = backward.buffers[BufferOf(backward, TensorId::kLse)].bytes;
  const auto out = Memory(device, out_bytes), lse = Memory(device, lse_bytes);
  const auto lend = [&](const Program& program) {
    return std::vector<LentBuffer>{{BufferOf(program, TensorId::kOut), out},
                                   {BufferOf(program, TensorId::kLse), lse}};
  };
  {
    Program forward = ProgramOf(Direction::kForward, false);
    std::vector<LentBuffer> lent = lend(forward);
    const int64_t all = forward.BufferBytes();
    auto operation =
        Operation::Create(Spec(), OneRank(), std::move(forward), {0}, &device, std::move(lent));
    ASSERT_TRUE(operation.ok()) << operation.status();
    EXPECT_EQ((*operation)->buffer_bytes(), all - out_bytes - lse_bytes);
    EXPECT_EQ((*operation)->OutputBuffer(TensorId::kOut), out.get());
    (void)RunToEnd(**operation, device);
  }
  std::vector<LentBuffer> lent = lend(backward);
  auto operation =
      Operation::Create(Spec(), OneRank(), std::move(backward), {0}, &device, std::move(lent));
  ASSERT_TRUE(operation.ok()) << operation.status();
  const auto gradients = RunToEnd(**operation, device);

  auto recomputing =
      Operation::Create(Spec(), OneRank(), ProgramOf(Direction::kBackward, true), {0}, &device);
  ASSERT_TRUE(recomputing.ok()) << recomputing.status();
  EXPECT_EQ(gradients, RunToEnd(**recomputing, device));
}

// Arrival times are measured when a ring forms and would affect the results' bits.
TEST(Operation, DeterministicRequestsAreNotMerged) {
  class WaitsForKeys : public ScalarDevice {
    bool TakesLateKeys(const ForwardCall&) const override { return true; }
  } device;
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (const bool deterministic : {false, true}) {
      AttentionSpec spec = Spec();
      spec.options.deterministic = deterministic;
      const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 2);
      Program program = MakeProgram(
          spec, plan,
          RecipeOn(plan, ScheduleKind::kRing, direction, direction == Direction::kBackward), 0);
      const KeyArrival arrival{.lanes = {{{1e11, absl::Microseconds(20)}, {}}}};
      auto operation =
          Operation::Bind(spec, plan, std::move(program), {0, 1}, &device, {}, arrival);
      ASSERT_TRUE(operation.ok()) << operation.status();
      int late = 0;
      for (const Step& step : (*operation)->program().steps) {
        for (const ComputeCall& call : step.calls) {
          for (const KvOperand& keys : call.kv) late += keys.late;
        }
      }
      EXPECT_EQ(late > 0, !deterministic);
    }
  }
}

// Wraps the calls of a device whose additions are atomic.
class AddsAtomically : public CpuDevice {
 public:
  AddsAtomically() : CpuDevice(/*threads=*/1, /*memory_limit_bytes=*/1 << 20) {}
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
    absl::StatusOr<PreparedCalls> prepared = CpuDevice::Prepare(std::move(calls));
    if (!prepared.ok()) return prepared;
    for (auto& call : *prepared) call = std::make_unique<Call>(std::move(call));
    return prepared;
  }

 private:
  class Call : public PreparedCall {
   public:
    explicit Call(std::unique_ptr<const PreparedCall> call) : call_(std::move(call)) {}
    bool adds_atomically() const override { return true; }
    EventRef Start(StartAfter after, RunControl* control) const override {
      return call_->Start(std::move(after), control);
    }

   private:
    const std::unique_ptr<const PreparedCall> call_;
  };
};

// Backward calls of a ring have only the sums of dq in common. Other calls, and those that follow
// them, wait for the call before.
TEST(Operation, BackwardCallsOfARingOverlap) {
  AddsAtomically device;
  for (const bool deterministic : {false, true}) {
    AttentionSpec spec = Spec();
    spec.options.deterministic = deterministic;
    const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 3);
    Program program =
        MakeProgram(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kBackward, true), 1);
    auto operation = Operation::Create(spec, plan, std::move(program), {0, 1, 2}, &device);
    ASSERT_TRUE(operation.ok()) << operation.status();
    int backwards = 0, beside = 0;
    bool after_backward = false;
    const std::vector<Step>& steps = (*operation)->program().steps;
    for (size_t step = 0; step < steps.size(); ++step) {
      for (size_t i = 0; i < steps[step].calls.size(); ++i) {
        const bool backward = steps[step].calls[i].op == ComputeCall::Op::kBackward;
        const bool flagged = (*operation)->ReadyCalls(step)[i].overlaps_previous;
        EXPECT_EQ(flagged, backward && after_backward && !deterministic);
        backwards += backward ? 1 : 0;
        beside += flagged ? 1 : 0;
        after_backward = backward;
      }
    }
    EXPECT_GE(backwards, 3);
    EXPECT_EQ(beside > 0, !deterministic);
  }
}

// Peers are ranks of the generation, which differ from the request's ranks.
TEST(Operation, KeysBroughtByComputeUnitsAreNotLate) {
  class WaitsForKeys : public ScalarDevice {
    bool TakesLateKeys(const ForwardCall&) const override { return true; }
  } device;
  const AttentionSpec spec = Spec();
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 2);
  for (const int slow : {1, 3}) {
    KeyArrival arrival{.lanes = {{{1e11, absl::Microseconds(20)}, {}}},
                       .takes_compute_units = {false, false, false, false}};
    arrival.takes_compute_units[slow] = true;
    auto operation = Operation::Bind(
        spec, plan,
        MakeProgram(spec, plan, RecipeOn(plan, ScheduleKind::kRing, Direction::kForward), 0),
        {2, 3}, &device, {}, arrival);
    ASSERT_TRUE(operation.ok()) << operation.status();
    int late = 0;
    for (const Step& step : (*operation)->program().steps) {
      for (const ComputeCall& call : step.calls) {
        for (const KvOperand& keys : call.kv) late += keys.late;
      }
    }
    EXPECT_EQ(late > 0, slow == 1) << slow;
  }
}

TEST(Operation, RejectsInvalidLoansByName) {
  ScalarDevice device;
  const auto refusal = [&](const Program& program, std::vector<LentBuffer> lent) {
    const absl::Status status =
        Operation::Bind(Spec(), OneRank(), program, {0}, &device, std::move(lent)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  using ::testing::HasSubstr;
  const Program program = ProgramOf(Direction::kForward, false);
  const BufferId lse = BufferOf(program, TensorId::kLse);
  EXPECT_THAT(refusal(program, {{lse, Memory(device, 4)}}),
              HasSubstr("lse has 4 bytes; the program needs 48"));
  EXPECT_THAT(refusal(program, {{99, Memory(device, 4)}}), HasSubstr("99"));
  EXPECT_THAT(refusal(program, {{lse, nullptr}}), HasSubstr("no such buffer"));
  EXPECT_THAT(refusal(program, {{lse, Memory(device, 48)}, {lse, Memory(device, 48)}}),
              HasSubstr("no such buffer"));
  // This ring's blocks alternate in the home shard's buffer, which would overwrite retained keys.
  AttentionSpec full = Spec();
  full.options.causal = false;
  const ShardPlan four = MakeShardPlan(full, Layout::kContiguous, 4);
  const Program ring =
      MakeProgram(full, four, RecipeOn(four, ScheduleKind::kRing, Direction::kForward), 1);
  const BufferId k = BufferOf(ring, TensorId::kK);
  const absl::Status status = Operation::Bind(full, four, ring, {0, 1, 2, 3}, &device,
                                              {{k, Memory(device, ring.buffers[k].bytes)}})
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("would overwrite"));
}

// An operation asks the device for its workspace once and prepares its kernels once.
TEST(Operation, BindsOnce) {
  class CountingDevice : public ScalarDevice {
   public:
    absl::StatusOr<int64_t> WorkspaceBytes(const std::vector<KernelCall>& calls) const override {
      ++asked;
      for (const KernelCall& call : calls) {
        if (const auto* forward = std::get_if<ForwardCall>(&call)) {
          EXPECT_EQ(forward->q, nullptr);
          pieces = forward->q_pieces.data();
        }
      }
      return 17;
    }
    absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
      // The same description, now with addresses.
      const auto& forward = std::get<ForwardCall>(calls.at(0));
      EXPECT_NE(forward.q, nullptr);
      EXPECT_EQ(forward.q_pieces.data(), pieces);
      return ScalarDevice::Prepare(std::move(calls));
    }
    mutable int asked = 0;
    mutable const Piece* pieces = nullptr;
  };
  CountingDevice device;
  const auto operation =
      Operation::Bind(Spec(), OneRank(), ProgramOf(Direction::kForward, false), {0}, &device);
  ASSERT_TRUE(operation.ok()) << operation.status();
  EXPECT_EQ((*operation)->workspace_bytes(), 17);
  ASSERT_TRUE((*operation)->Allocate().ok());
  EXPECT_EQ(device.asked, 1);
}

}  // namespace
}  // namespace ringattn::worker

#include "tests/sweep/run_problem.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "common/oracle/numeric.h"
#include "tests/sweep/naive_device.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/executor/run_in_process.h"
#include "worker/kernels/cpu/cpu_kernels.h"
#include "worker/kernels/naive/naive_kernels.h"

namespace ringattn::tests {

using namespace ringattn::worker;  // what is under test
namespace {

// Bounds what the device keeps for later buffers, not the buffers.
constexpr int64_t kMemoryLimitBytes = int64_t{1} << 30;

absl::StatusOr<TensorMap> RunExecutor(const AttentionSpec& spec, const ShardPlan& plan,
                                      const Schedule& schedule, const TensorMap& inputs,
                                      KernelSet kernels) {
  const auto make_device = [kernels]() -> std::unique_ptr<Device> {
    if (kernels == KernelSet::kNaive) return std::make_unique<NaiveDevice>();
    return std::make_unique<CpuDevice>(/*threads=*/1, kMemoryLimitBytes);
  };
  absl::StatusOr<InProcessResult> result = RunInProcess(spec, plan, schedule, inputs, make_device);
  if (!result.ok()) return result.status();
  return std::move(result->outputs);
}

absl::StatusOr<TensorMap> RunInterpreter(const AttentionSpec& spec, const ShardPlan& plan,
                                         const Schedule& schedule, const TensorMap& inputs,
                                         KernelSet kernels, Cut cut) {
  if (kernels == KernelSet::kNaive) {
    return Interpret(
        spec, plan, schedule, inputs,
        [](const KernelCall& call) {
          RunNaively(call);
          return absl::OkStatus();
        },
        cut);
  }
  // Two threads, where the executor's devices have one: the bits must be the same.
  CpuKernels cpu(/*threads=*/2);
  std::atomic<bool> stop{false};
  std::atomic<int64_t> progress{0};
  return Interpret(
      spec, plan, schedule, inputs,
      [&](const KernelCall& call) { return cpu.Run(call, stop, &progress); }, cut);
}

// Returns 1, 2 or 3 hosts, at most as many as ranks.
int HostsOf(const Case& c) {
  if (c.group_size > 1) return static_cast<int>(c.world_size / c.group_size);
  return std::min(c.world_size, 1 + static_cast<int>(c.spec.shape.seq_len_q % 3));
}

}  // namespace

absl::StatusOr<TensorMap> RunProblem(const AttentionSpec& spec, const Placement& placement,
                                     Direction direction, bool recompute_forward,
                                     const TensorMap& inputs, Engine engine, KernelSet kernels) {
  const ProgramRecipe recipe = {.schedule = placement.schedule,
                                .layout = placement.layout,
                                .stripe = placement.stripe,
                                .direction = direction,
                                .recompute_forward = recompute_forward,
                                .heads_per_step = placement.heads_per_step,
                                .group_size = placement.group_size,
                                .tuning = placement.tuning};
  const ShardPlan plan = MakeShardPlan(spec, recipe, placement.world_size);
  Schedule schedule = MakeSchedule(spec, plan, recipe);
  std::vector<int> host_of_rank;
  for (int rank = 0; rank < placement.world_size; ++rank) {
    host_of_rank.push_back(rank * placement.hosts / placement.world_size);
  }
  for (Program& program : schedule.programs) AssignLanes(host_of_rank, program);
  switch (engine) {
    case Engine::kExecutor:
      return RunExecutor(spec, plan, schedule, inputs, kernels);
    case Engine::kInterpreter:
      return RunInterpreter(spec, plan, schedule, inputs, kernels, Cut::kPieces);
    case Engine::kInterpreterByRow:
      return RunInterpreter(spec, plan, schedule, inputs, kernels, Cut::kRows);
  }
  return absl::InternalError("no such engine");
}

TensorMap ToTensorMap(const oracle::InputTensors& inputs) {
  TensorMap tensors = {
      {TensorId::kQ, inputs.q}, {TensorId::kK, inputs.k}, {TensorId::kV, inputs.v}};
  if (inputs.has_dout) tensors[TensorId::kDout] = inputs.dout;
  const auto add = [&](TensorId id, const std::vector<float>& values) {
    if (values.empty()) return;
    const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
    tensors[id].assign(bytes, bytes + values.size() * sizeof(float));
  };
  add(TensorId::kSinks, inputs.sinks);
  add(TensorId::kDlse, inputs.dlse);
  tensors[TensorId::kBias] = inputs.bias;
  tensors[TensorId::kMask] = inputs.mask;
  const auto add_ids = [&](TensorId id, const std::vector<int32_t>& ids) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(ids.data());
    tensors[id].assign(bytes, bytes + ids.size() * sizeof(int32_t));
  };
  add_ids(TensorId::kQSegmentIds, inputs.q_segment_ids);
  add_ids(TensorId::kKvSegmentIds, inputs.kv_segment_ids);
  // An empty tensor is there all the same.
  if (inputs.has_dout) tensors.try_emplace(TensorId::kDlse);
  return tensors;
}

void AddForwardResult(const AttentionSpec& spec, const oracle::Result& result, TensorMap* inputs) {
  const AttentionShape& shape = spec.shape;
  std::vector<uint8_t>& out = (*inputs)[TensorId::kOut];
  out.resize(result.out.twin.size() * oracle::BytesOf(spec.result_dtype()));
  for (size_t e = 0; e < result.out.twin.size(); ++e) {
    oracle::Store(spec.result_dtype(), out.data(), static_cast<int64_t>(e), result.out.twin[e]);
  }
  std::vector<uint8_t>& lse = (*inputs)[TensorId::kLse];
  lse.resize(result.lse.rows.size() * sizeof(float));
  for (size_t r = 0; r < result.lse.rows.size(); ++r) {
    const oracle::RowId& row = result.lse.rows[r];
    oracle::Store(DType::kFloat32, lse.data(),
                  (row.batch * shape.num_heads + row.head) * shape.seq_len_q + row.token,
                  result.lse.exact[r]);
  }
}

oracle::Outputs ToOutputs(const TensorMap& outputs) {
  const auto find = [&](TensorId id) -> const void* {
    const auto tensor = outputs.find(id);
    return tensor == outputs.end() ? nullptr : tensor->second.data();
  };
  return {find(TensorId::kOut),   static_cast<const float*>(find(TensorId::kLse)),
          find(TensorId::kDq),    find(TensorId::kDk),
          find(TensorId::kDv),    static_cast<const float*>(find(TensorId::kDsinks)),
          find(TensorId::kDbias), static_cast<const float*>(find(TensorId::kProbabilities))};
}

CaseResult RunCase(const Case& c, const oracle::InputTensors& inputs,
                   const oracle::Result& expected, Engine engine, KernelSet kernels) {
  CaseResult result;
  TensorMap tensors = ToTensorMap(inputs);
  const bool forward = c.direction == Direction::kForward;
  const Placement placement = {c.layout,
                               c.world_size,
                               c.stripe,
                               c.world_size == 1 ? ScheduleKind::kSingle : c.schedule,
                               c.world_size == 1 ? 0 : c.heads_per_step,
                               {},
                               c.world_size == 1 ? 0 : c.group_size,
                               HostsOf(c)};
  if (!forward && !c.recompute_forward) {
    if (c.data == oracle::DataKind::kVastScores) {
      // Backward asks for this service's own lse there (docs/numerics.md): p of a key that no
      // other comes near is 1 only if score and lse were rounded alike.
      absl::StatusOr<TensorMap> own =
          RunProblem(c.spec, placement, Direction::kForward, false, tensors, engine, kernels);
      result.status = own.status();
      if (!own.ok()) return result;
      tensors.merge(*own);
    } else {
      AddForwardResult(c.spec, expected, &tensors);
    }
  }
  absl::StatusOr<TensorMap> outputs =
      RunProblem(c.spec, placement, c.direction, c.recompute_forward, tensors, engine, kernels);
  result.status = outputs.status();
  if (!outputs.ok()) return result;
  result.outputs = *std::move(outputs);
  for (const TensorId id : OutputsOf(c.spec, c.direction)) {
    if (result.outputs.count(id) == 0) {
      result.status = absl::InternalError(std::string("no output ") + TensorName(id));
      return result;
    }
  }
  result.report = oracle::Compare(c.spec, expected, ToOutputs(result.outputs));
  return result;
}

}  // namespace ringattn::tests

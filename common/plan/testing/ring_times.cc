// Prints how long a causal zigzag ring over hosts takes, by the timing simulator and by the cost
// model, as one JSON object. Measured passes are compared with it
// (tests/gpu/service/hosts_exposed.py).
//
//   ring_times --tokens=65536 --hosts=2 --per_host=1 --compute_seconds=0.01
//       --host_link_bytes_per_s=3.1e9
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "common/plan/cost_model.h"
#include "common/plan/host_rings.h"
#include "common/plan/testing/timing_simulator.h"

ABSL_FLAG(int64_t, tokens, 65536, "Tokens of the whole ring");
ABSL_FLAG(int64_t, heads, 32, "Query heads");
ABSL_FLAG(int64_t, kv_heads, 8, "Key/value heads");
ABSL_FLAG(int64_t, head_dim, 128, "Elements per head");
ABSL_FLAG(bool, backward, false, "The backward pass");
ABSL_FLAG(bool, double_ring, false, "A double ring in groups of --per_host");
ABSL_FLAG(int, hosts, 2, "Hosts");
ABSL_FLAG(int, per_host, 1, "Ranks of each host");
ABSL_FLAG(double, compute_seconds, 0,
          "Measured seconds of the busiest rank's calls, which set the rate of all devices");
ABSL_FLAG(double, link_bytes_per_s, 3e11, "Rate between two ranks of a host");
ABSL_FLAG(double, host_link_bytes_per_s, 0, "Rate of one rank to another host");
ABSL_FLAG(double, host_total_bytes_per_s, 0, "Rate of a host; 0: that of one rank");
ABSL_FLAG(double, exchange_overhead_s, 1e-5, "Of a step's transfers inside a host");
ABSL_FLAG(double, host_exchange_overhead_s, 1e-4, "Of a step's transfers between hosts");

namespace ringattn {
namespace {

AttentionSpec SpecOfFlags() {
  const int64_t tokens = absl::GetFlag(FLAGS_tokens);
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.num_heads = absl::GetFlag(FLAGS_heads);
  spec.shape.num_kv_heads = absl::GetFlag(FLAGS_kv_heads);
  spec.shape.head_dim = spec.shape.head_dim_v = absl::GetFlag(FLAGS_head_dim);
  spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, tokens};
  spec.options.causal = true;
  return spec;
}

double MostFlops(const AttentionSpec& spec, const std::vector<Program>& programs) {
  double most = 0;
  for (const Program& program : programs) {
    double flops = 0;
    for (const Step& step : program.steps) {
      for (const ComputeCall& call : step.calls) flops += FlopsOfCall(spec, call);
    }
    most = std::max(most, flops);
  }
  return most;
}

int Main() {
  const int per_host = absl::GetFlag(FLAGS_per_host);
  const int world_size = absl::GetFlag(FLAGS_hosts) * per_host;
  const AttentionSpec spec = SpecOfFlags();
  ProgramRecipe recipe;
  recipe.layout = Layout::kZigzag;
  recipe.direction = absl::GetFlag(FLAGS_backward) ? Direction::kBackward : Direction::kForward;
  recipe.schedule = ScheduleKind::kRing;
  if (absl::GetFlag(FLAGS_double_ring)) {
    recipe.schedule = ScheduleKind::kDoubleRing;
    recipe.group_size = per_host;
  }
  std::vector<int> host_of_rank;
  if (absl::GetFlag(FLAGS_hosts) > 1) {
    for (int rank = 0; rank < world_size; ++rank) host_of_rank.push_back(rank / per_host);
  }
  const ShardPlan plan = MakeShardPlan(spec, recipe, world_size);
  ScheduleBuilder builder(spec, plan, recipe);
  std::vector<Program> programs;
  for (int rank = 0; rank < world_size; ++rank) {
    programs.push_back(builder.MakeProgram(rank));
    AssignLanes(host_of_rank, programs.back());
  }
  PlannerInputs inputs;
  inputs.ready_workers = world_size;
  inputs.device_flops_per_s = MostFlops(spec, programs) / absl::GetFlag(FLAGS_compute_seconds);
  inputs.step_overhead_s = 0;
  inputs.link_bytes_per_s = absl::GetFlag(FLAGS_link_bytes_per_s);
  inputs.host_link_bytes_per_s = absl::GetFlag(FLAGS_host_link_bytes_per_s);
  inputs.host_total_bytes_per_s = absl::GetFlag(FLAGS_host_total_bytes_per_s);
  inputs.exchange_overhead_s = absl::GetFlag(FLAGS_exchange_overhead_s);
  inputs.host_exchange_overhead_s = absl::GetFlag(FLAGS_host_exchange_overhead_s);
  const SimulatedTimes times = SimulateTimes(spec, programs, inputs, host_of_rank);
  CostSum costs(spec, inputs, host_of_rank);
  for (const Program& program : programs) costs.Add(program);
  const double predicted = std::move(costs).Finish(recipe, plan).predicted_compute_seconds;
  std::printf(
      "{\"seconds\": %.6g, \"exposed_seconds\": %.6g, \"predicted_seconds\": %.6g, "
      "\"device_flops_per_s\": %.4g}\n",
      times.seconds, times.exposed_seconds(), predicted, inputs.device_flops_per_s);
  return 0;
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("Prints the simulated time of a ring over hosts as JSON.");
  absl::ParseCommandLine(argc, argv);
  for (const auto* flag : {&FLAGS_compute_seconds, &FLAGS_host_link_bytes_per_s}) {
    if (absl::GetFlag(*flag) > 0) continue;
    std::fprintf(stderr, "--compute_seconds and --host_link_bytes_per_s must be above 0\n");
    return 2;
  }
  return ringattn::Main();
}

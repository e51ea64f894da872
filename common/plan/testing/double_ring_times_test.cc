// Times of flat and double rings over hosts, by the timing simulator: what a double ring hides, and
// whether the cost model predicts it. Rates are those of H200 GPUs with 25 GB/s per GPU between
// hosts unless a test says otherwise.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "common/plan/cost_model.h"
#include "common/plan/host_rings.h"
#include "common/plan/testing/timing_simulator.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

constexpr double kFlops = 6e14;
constexpr double kLink = 3e11;
constexpr int64_t kQueryHeads = 32, kKvHeads = 8, kDim = 128;

AttentionSpec CausalSpec(int64_t tokens) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.num_heads = kQueryHeads;
  spec.shape.num_kv_heads = kKvHeads;
  spec.shape.head_dim = spec.shape.head_dim_v = kDim;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, tokens};
  spec.options.causal = true;
  return spec;
}

// Tokens per rank from which a transfer of K/V, of `bytes_per_s`, takes no longer than a step of a
// zigzag ring, half of whose pairs are visible.
double HidingTokens(double bytes_per_s) {
  const double flops_per_pair = 4.0 * kDim * kQueryHeads / 2;
  const double bytes_per_token = 2.0 * 2 * kDim * kKvHeads;
  return bytes_per_token * kFlops / (flops_per_pair * bytes_per_s);
}

struct Ring {
  int hosts = 1;
  int per_host = 4;
  double host_bytes_per_s = 1e11;  // shared by the host's ranks
  // Each rank has a network card with its part of the host's rate. Otherwise they share one.
  bool card_per_rank = false;

  int world_size() const { return hosts * per_host; }
  std::vector<int> host_of_rank() const {
    std::vector<int> hosts_by_rank;
    for (int rank = 0; rank < world_size(); ++rank) hosts_by_rank.push_back(rank / per_host);
    return hosts_by_rank;
  }
  PlannerInputs Inputs() const {
    PlannerInputs inputs;
    inputs.ready_workers = world_size();
    inputs.device_flops_per_s = kFlops;
    inputs.link_bytes_per_s = kLink;
    inputs.step_overhead_s = 5e-6;
    inputs.exchange_overhead_s = 5e-6;
    inputs.host_exchange_overhead_s = 2e-5;
    inputs.host_link_bytes_per_s = card_per_rank ? host_bytes_per_s / per_host : host_bytes_per_s;
    inputs.host_total_bytes_per_s = host_bytes_per_s;
    return inputs;
  }
};

struct Times {
  double simulated = 0;
  double predicted = 0;
};

Times TimesOf(const Ring& ring, int64_t tokens_per_rank, ScheduleKind kind, Direction direction) {
  const AttentionSpec spec = CausalSpec(tokens_per_rank * ring.world_size());
  ProgramRecipe recipe;
  recipe.schedule = kind;
  recipe.layout = Layout::kZigzag;
  recipe.direction = direction;
  if (kind == ScheduleKind::kDoubleRing) recipe.group_size = ring.per_host;
  const ShardPlan plan = MakeShardPlan(spec, recipe, ring.world_size());
  const std::vector<int> hosts = ring.hosts == 1 ? std::vector<int>() : ring.host_of_rank();
  const PlannerInputs inputs = ring.Inputs();
  ScheduleBuilder builder(spec, plan, recipe);
  CostSum costs(spec, inputs, hosts);
  std::vector<Program> programs;
  for (int rank = 0; rank < ring.world_size(); ++rank) {
    programs.push_back(builder.MakeProgram(rank));
    AssignLanes(hosts, programs.back());
    costs.Add(programs.back());
  }
  Times times;
  times.simulated = SimulateTimes(spec, programs, inputs, hosts).seconds;
  times.predicted = std::move(costs).Finish(recipe, plan).predicted_compute_seconds;
  return times;
}

// A double ring over two hosts of two GPUs takes as long as a ring of four GPUs of one host, from
// 1.5 times the tokens at which an outer hop takes as long as its round.
TEST(DoubleRingTimesTest, HidesTheLinkBetweenHosts) {
  const Ring one{.hosts = 1, .per_host = 4};
  for (double per_gpu : {3.125e9, 1.25e10, 5e10}) {
    const Ring two{.hosts = 2, .per_host = 2, .host_bytes_per_s = 2 * per_gpu};
    const auto tokens =
        static_cast<int64_t>(1.5 * HidingTokens(per_gpu * two.per_host) / 1024 + 1) * 1024;
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      const double alone = TimesOf(one, tokens, ScheduleKind::kRing, direction).simulated;
      const double flat = TimesOf(two, tokens, ScheduleKind::kRing, direction).simulated;
      const double twofold = TimesOf(two, tokens, ScheduleKind::kDoubleRing, direction).simulated;
      std::printf(
          "%.3g GB/s per GPU, %lld tokens per GPU, %s: one host / double ring %.3f, one "
          "host / flat ring %.3f\n",
          per_gpu / 1e9, static_cast<long long>(tokens),
          direction == Direction::kForward ? "forward" : "backward", alone / twofold, alone / flat);
      EXPECT_GE(alone / twofold, direction == Direction::kForward ? 0.95 : 0.93);
      EXPECT_GE(flat / twofold, 0.999);
    }
  }
}

// Larger groups hide slower links, because all ranks of a host send at once.
TEST(DoubleRingTimesTest, IsFasterThanAFlatRingWhereItsLinkIsExposed) {
  for (int per_host : {4, 8}) {
    const Ring two{.hosts = 2,
                   .per_host = per_host,
                   .host_bytes_per_s = 1.25e10 * per_host,
                   .card_per_rank = true};
    for (int64_t tokens : {4096, 8192, 16384}) {
      for (Direction direction : {Direction::kForward, Direction::kBackward}) {
        // In a flat ring, one rank of a host uses its card.
        const Times in_one = TimesOf(two, tokens, ScheduleKind::kRing, direction);
        const Times in_two = TimesOf(two, tokens, ScheduleKind::kDoubleRing, direction);
        const double flat = in_one.simulated, twofold = in_two.simulated;
        std::printf("2 x %d, %lld tokens per GPU, %s: flat / double ring %.2f\n", per_host,
                    static_cast<long long>(tokens),
                    direction == Direction::kForward ? "forward" : "backward", flat / twofold);
        EXPECT_GE(flat / twofold, tokens <= 8192 ? 1.5 : 1.0);
        // So the planner takes the double ring.
        EXPECT_GE(in_one.predicted / in_two.predicted, tokens <= 8192 ? 1.2 : 1.0);
      }
    }
  }
}

TEST(DoubleRingTimesTest, TheCostModelPredictsThem) {
  // Forward and backward. A backward's many transfers wait for each other less than the model
  // assumes.
  double least[] = {10, 10}, most[] = {0, 0};
  double most_backward_with_cards = 0;
  for (const Ring& ring : {Ring{.hosts = 2, .per_host = 2}, Ring{.hosts = 2, .per_host = 4},
                           Ring{.hosts = 3, .per_host = 2}, Ring{.hosts = 4, .per_host = 4},
                           Ring{.hosts = 2, .per_host = 2, .card_per_rank = true},
                           Ring{.hosts = 2, .per_host = 4, .card_per_rank = true}}) {
    for (double per_gpu : {1.25e9, 1.25e10}) {
      Ring shaped = ring;
      shaped.host_bytes_per_s = per_gpu * ring.per_host;
      for (double share : {0.25, 1.0, 4.0}) {
        const auto tokens =
            static_cast<int64_t>(share * HidingTokens(shaped.host_bytes_per_s) / 256 + 1) * 256;
        for (Direction direction : {Direction::kForward, Direction::kBackward}) {
          const Times times = TimesOf(shaped, tokens, ScheduleKind::kDoubleRing, direction);
          const double ratio = times.predicted / times.simulated;
          std::printf(
              "%d x %d, %.3g GB/s per GPU%s, %.2g of the hiding length, %s: predicted / "
              "simulated %.2f\n",
              ring.hosts, ring.per_host, per_gpu / 1e9, ring.card_per_rank ? " and card" : "",
              share, direction == Direction::kForward ? "forward" : "backward", ratio);
          const int pass = direction == Direction::kBackward;
          least[pass] = std::min(least[pass], ratio);
          double& highest = pass == 1 && ring.card_per_rank ? most_backward_with_cards : most[pass];
          highest = std::max(highest, ratio);
        }
      }
    }
  }
  EXPECT_GE(least[0], 0.95);
  EXPECT_LE(most[0], 1.05);
  EXPECT_GE(least[1], 0.95);
  EXPECT_LE(most[1], 1.3);
  EXPECT_LE(most_backward_with_cards, 1.4);
}

// With one host and links that cost nothing, the time is that of the devices.
TEST(DoubleRingTimesTest, TheSimulatorAddsUpCalls) {
  const AttentionSpec spec = CausalSpec(8192);
  ProgramRecipe recipe;
  recipe.schedule = ScheduleKind::kRing;
  recipe.layout = Layout::kZigzag;
  const ShardPlan plan = MakeShardPlan(spec, recipe, 4);
  PlannerInputs inputs;
  inputs.device_flops_per_s = kFlops;
  inputs.step_overhead_s = 0;
  inputs.link_bytes_per_s = 1e18;
  const Schedule schedule = MakeSchedule(spec, plan, recipe);
  const SimulatedTimes fast = SimulateTimes(spec, schedule.programs, inputs, {});
  double flops = 0;
  for (const Step& step : schedule.programs[0].steps) {
    for (const ComputeCall& call : step.calls) flops += FlopsOfCall(spec, call);
  }
  EXPECT_NEAR(fast.busy_seconds[0], flops / kFlops, 1e-9);
  EXPECT_NEAR(fast.seconds, flops / kFlops, 1e-7);
  EXPECT_NEAR(fast.exposed_seconds(), 0, 1e-7);
  // A slow link is exposed: three steps of K/V, of 2,048 rows each.
  inputs.link_bytes_per_s = 1e9;
  const SimulatedTimes slow = SimulateTimes(spec, schedule.programs, inputs, {});
  EXPECT_NEAR(slow.seconds, 3 * 2048 * 4096 / 1e9 + slow.busy_seconds[0] / 4, 2e-4);
}

}  // namespace
}  // namespace ringattn

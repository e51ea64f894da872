#include "common/plan/planner.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "common/attention/tensors.h"
#include "common/base/limits.h"
#include "common/base/testing/time_factor.h"
#include "common/plan/cost_model.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

AttentionSpec Spec(int64_t tokens, bool causal) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, tokens};
  spec.shape.num_heads = 8;
  spec.shape.num_kv_heads = 2;
  spec.shape.head_dim = spec.shape.head_dim_v = 64;
  spec.options.causal = causal;
  return spec;
}

PlannerInputs Workers(int ready) {
  PlannerInputs inputs;
  inputs.ready_workers = ready;
  return inputs;
}

Plan MustPlan(const AttentionSpec& spec, const PlanChoice& choice, int workers,
              Direction direction = Direction::kForward) {
  const absl::StatusOr<Plan> plan = PlanRequest(spec, direction, choice, Workers(workers));
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *plan : Plan{};
}

TEST(PlannerTest, ThresholdDecidesBetweenOneDeviceAndTheRing) {
  const Plan small = MustPlan(Spec(32768, true), {}, 4);
  EXPECT_EQ(small.recipe.schedule, ScheduleKind::kSingle);
  EXPECT_EQ(small.shards.world_size, 1);
  EXPECT_EQ(small.exchanged_bytes, 0);
  EXPECT_TRUE(absl::StrContains(small.reason, "32768")) << small.reason;
  const Plan large = MustPlan(Spec(32769, true), {}, 4);
  EXPECT_EQ(large.recipe.schedule, ScheduleKind::kRing);
  EXPECT_EQ(large.shards.world_size, 4);
  EXPECT_EQ(MustPlan(Spec(100000, true), {}, 1).recipe.schedule, ScheduleKind::kSingle);
  // The longer axis counts, and every batch row.
  AttentionSpec batched = Spec(20000, true);
  batched.shape.batch = 2;
  EXPECT_EQ(MustPlan(batched, {}, 2).recipe.schedule, ScheduleKind::kRing);
}

// 8 heads, d 64, bf16: tiles of 256 x 256 hold all pairs of a short request, so the test can
// separate the terms of the prediction.
TEST(PlannerTest, PredictionsAreMadeOfWhatWorkersMeasured) {
  const AttentionSpec spec = Spec(4096, false);
  PlanChoice choice;
  choice.schedule = ScheduleKind::kRing;
  PlannerInputs inputs = Workers(4);
  inputs.device_flops_per_s = 1e30;
  inputs.link_bytes_per_s = 1e30;
  inputs.step_overhead_s = 0;
  const auto plan = [&] { return *PlanRequest(spec, Direction::kForward, choice, inputs); };
  EXPECT_LT(plan().predicted_compute_seconds, 1e-15);

  // Four steps of one call each; three of them have an exchange alongside the call, for which the
  // next call waits.
  ASSERT_EQ(plan().step_count, 4);
  inputs.step_overhead_s = 0.5;
  EXPECT_NEAR(plan().predicted_compute_seconds, 4 * 0.5, 1e-9);
  inputs.exchange_overhead_s = 3;
  EXPECT_NEAR(plan().predicted_compute_seconds, 3 * 3 + 0.5, 1e-9);
  // K and V of 1,024 tokens, 2 heads of 64: 512 KiB per step, in addition to the exchange overhead.
  inputs.link_bytes_per_s = 512 * 1024;
  EXPECT_NEAR(plan().predicted_compute_seconds, 3 * (3 + 1) + 0.5, 1e-9);
  // Compute hides an exchange.
  inputs.device_flops_per_s = plan().flops / 4 / 4 / 100;
  EXPECT_NEAR(plan().predicted_compute_seconds, 4 * (100 + 0.5), 1);
  EXPECT_NEAR(plan().predicted_step_seconds, 100.5, 0.5);
}

TEST(PlannerTest, LayoutFollowsTheMask) {
  EXPECT_EQ(MustPlan(Spec(65536, true), {}, 4).shards.layout, Layout::kZigzag);
  EXPECT_EQ(MustPlan(Spec(65536, false), {}, 4).shards.layout, Layout::kContiguous);
  AttentionSpec window = Spec(65536, true);
  window.options.window_left = 1024;
  EXPECT_EQ(MustPlan(window, {}, 4).shards.layout, Layout::kContiguous);
  window.options.window_left = 50000;  // longer than a shard
  EXPECT_EQ(MustPlan(window, {}, 4).shards.layout, Layout::kZigzag);
}

TEST(PlannerTest, DocumentsDecideByCost) {
  AttentionSpec spec = Spec(65536, true);
  spec.shape.packed = true;
  // As many equal documents as ranks: contiguous needs no exchange.
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 16384, 32768, 49152, 65536};
  const Plan equal = MustPlan(spec, {}, 4);
  EXPECT_EQ(equal.shards.layout, Layout::kContiguous);
  EXPECT_EQ(equal.exchanged_bytes, 0);
  // One long document among short ones.
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 100, 65000, 65536};
  const Plan uneven = MustPlan(spec, {}, 4);
  EXPECT_EQ(uneven.shards.layout, Layout::kZigzagPerDocument) << uneven.reason;
}

TEST(PlannerTest, ForcedChoicesAreKept) {
  PlanChoice choice;
  choice.layout = Layout::kStriped;
  choice.world_size = 3;
  choice.stripe = 16;
  const Plan plan = MustPlan(Spec(1000, true), choice, 4);
  EXPECT_EQ(plan.recipe.schedule, ScheduleKind::kRing);
  EXPECT_EQ(plan.shards.layout, Layout::kStriped);
  EXPECT_EQ(plan.shards.world_size, 3);
  EXPECT_EQ(plan.shards.stripe, 16);

  PlanChoice ring;
  ring.schedule = ScheduleKind::kRing;
  EXPECT_EQ(MustPlan(Spec(1000, true), ring, 4).shards.world_size, 4);
  PlanChoice single;
  single.schedule = ScheduleKind::kSingle;
  EXPECT_EQ(MustPlan(Spec(1 << 20, true), single, 4).shards.world_size, 1);
  PlanChoice gather;
  gather.schedule = ScheduleKind::kAllGather;
  EXPECT_EQ(MustPlan(Spec(1000, true), gather, 4).shards.world_size, 4);
  EXPECT_EQ(MustPlan(Spec(1000, true), gather, 4).recipe.schedule, ScheduleKind::kAllGather);
  EXPECT_EQ(MustPlan(Spec(1000, true), {}, 4).recipe.schedule, ScheduleKind::kSingle);
  // A ring of one is a single device.
  ring.world_size = 1;
  EXPECT_EQ(MustPlan(Spec(1000, true), ring, 4).recipe.schedule, ScheduleKind::kSingle);
}

// Documents whose best layout depends on the link speed.
TEST(PlannerTest, MeasuredRatesChooseNoLayoutOfADeterministicRequest) {
  AttentionSpec spec = Spec(6 * 8192, true);
  spec.shape.packed = true;
  spec.shape.cu_seqlens_q = {0};
  for (int64_t length : {24576, 8192, 8192, 4096, 4096}) {
    spec.shape.cu_seqlens_q.push_back(spec.shape.cu_seqlens_q.back() + length);
  }
  spec.shape.cu_seqlens_k = spec.shape.cu_seqlens_q;
  PlannerInputs slow_link = Workers(4), fast_link = Workers(4);
  slow_link.link_bytes_per_s = 1e5;
  fast_link.link_bytes_per_s = 1e12;
  const auto layout = [&](const PlannerInputs& inputs) {
    const absl::StatusOr<Plan> plan = PlanRequest(spec, Direction::kForward, {}, inputs);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan->shards.layout;
  };
  ASSERT_NE(layout(slow_link), layout(fast_link));
  spec.options.deterministic = true;
  EXPECT_EQ(layout(slow_link), layout(fast_link));
  // The prediction still reflects the actual ring.
  const auto seconds = [&](const PlannerInputs& inputs) {
    return PlanRequest(spec, Direction::kForward, {}, inputs)->predicted_compute_seconds;
  };
  EXPECT_GT(seconds(slow_link), 10 * seconds(fast_link));
}

TEST(PlannerTest, RefusalsNameTheFieldAndTheNumber) {
  PlanChoice choice;
  choice.world_size = 5;
  const absl::Status few =
      PlanRequest(Spec(1000, true), Direction::kForward, choice, Workers(4)).status();
  EXPECT_EQ(few.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(few.message(), "plan.world_size: is 5, but only 4 workers are ready");

  choice.schedule = ScheduleKind::kSingle;
  const absl::Status contradiction =
      PlanRequest(Spec(1000, true), Direction::kForward, choice, Workers(8)).status();
  EXPECT_EQ(contradiction.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(contradiction.message(), "plan.world_size"));

  EXPECT_EQ(PlanRequest(Spec(1000, true), Direction::kForward, {}, Workers(0)).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST(PlannerTest, ManyStripesArePlannedQuickly) {
  PlanChoice choice;
  choice.layout = Layout::kStriped;
  choice.recompute_forward = true;
  choice.stripe = 16;
  const std::clock_t begin = std::clock();  // processor time: other processes share the machine
  for (int world_size : {2, 8, 64}) {
    choice.world_size = world_size;
    const Plan plan =
        MustPlan(Spec(kMaxStripes * 16, true), choice, world_size, Direction::kBackward);
    EXPECT_EQ(plan.shards.q[1].size(), kMaxStripes / world_size);
  }
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, 4.0 * kTimeFactor);
}

// The maximum number of pieces that planning accepts: 2^17 documents on each of 4 ranks.
AttentionSpec ManyStripedDocuments() {
  AttentionSpec spec = Spec(int64_t{1} << 23, true);
  spec.shape.packed = true;
  spec.shape.cu_seqlens_q.clear();
  for (int64_t d = 0; d <= 1 << 17; ++d) spec.shape.cu_seqlens_q.push_back(d * 64);
  spec.shape.cu_seqlens_k = spec.shape.cu_seqlens_q;
  return spec;
}

PlanChoice StripedOverFour() {
  PlanChoice choice;
  choice.layout = Layout::kStriped;
  choice.recompute_forward = true;
  choice.world_size = 4;
  return choice;
}

TEST(PlannerTest, ManyStripedDocumentsArePlannedQuickly) {
  const AttentionSpec spec = ManyStripedDocuments();
  const std::clock_t begin = std::clock();  // processor time: other processes share the machine
  MustPlan(spec, StripedOverFour(), 4, Direction::kBackward);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, 2.0 * kTimeFactor);
}

// The longest interval between two polls bounds the delay of a cancellation.
TEST(PlannerTest, CancellationIsPolledOften) {
  const AttentionSpec spec = ManyStripedDocuments();
  std::clock_t last = std::clock();
  double longest = 0;
  PlanControl control;
  control.cancelled = [&] {
    const std::clock_t now = std::clock();
    longest = std::max(longest, static_cast<double>(now - last) / CLOCKS_PER_SEC);
    last = now;
    return false;
  };
  ASSERT_TRUE(PlanRequest(spec, Direction::kBackward, StripedOverFour(), Workers(4), control).ok());
  EXPECT_LT(longest, 0.2 * kTimeFactor);
}

TEST(PlannerTest, StripesThatShredTheShardsAreRefused) {
  const auto refusal = [](AttentionSpec spec, int64_t stripe, int world_size) {
    PlanChoice choice;
    choice.layout = Layout::kStriped;
    choice.world_size = world_size;
    choice.stripe = stripe;
    const absl::Status status =
        PlanRequest(spec, Direction::kForward, choice, Workers(world_size)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(
      refusal(Spec(kMaxStripes * 2 + 1, true), 2, 8),
      "plan.stripe: stripes of 2 divide 131073 tokens into 65537 stripes, the limit is 65536: "
      "choose longer stripes, or 1");
  // Every rank has a piece of every document.
  AttentionSpec spec = Spec(int64_t{1} << 20, true);
  spec.shape.packed = true;
  spec.shape.cu_seqlens_q.clear();
  for (int64_t d = 0; d <= 1 << 11; ++d) spec.shape.cu_seqlens_q.push_back(d * 512);
  spec.shape.cu_seqlens_k = spec.shape.cu_seqlens_q;
  EXPECT_EQ(refusal(spec, 1, 64),
            "plan.stripe: stripes of 1 over 64 ranks divide 2048 documents into 131072 pieces, the "
            "limit for this ring size is 65536: choose longer stripes, another layout or fewer "
            "ranks");
}

TEST(PlannerTest, LongUnevenDocumentsUseZigzagPerDocument) {
  AttentionSpec spec = Spec(65536, true);
  spec.shape.packed = true;
  spec.shape.cu_seqlens_q = {0, 1000, 31000, 35000, 47000, 47500, 65536};
  spec.shape.cu_seqlens_k = spec.shape.cu_seqlens_q;
  for (Direction direction : {Direction::kForward, Direction::kBackward}) {
    const Plan plan = MustPlan(spec, {}, 4, direction);
    EXPECT_EQ(plan.shards.layout, Layout::kZigzagPerDocument) << plan.reason;
    const int64_t most = *std::max_element(plan.tiles.begin(), plan.tiles.end());
    EXPECT_GT(std::accumulate(plan.tiles.begin(), plan.tiles.end(), int64_t{0}), 0.96 * 4 * most);
    PlanChoice zigzag;
    zigzag.layout = Layout::kZigzag;
    const Plan together = MustPlan(spec, zigzag, 4, direction);
    EXPECT_LT(plan.predicted_compute_seconds, 0.95 * together.predicted_compute_seconds);
  }
}

TEST(PlannerTest, ManyDocumentsArePlannedQuickly) {
  AttentionSpec spec = Spec(1 << 24, true);
  spec.shape.packed = true;
  spec.shape.cu_seqlens_q.clear();
  for (int64_t d = 0; d <= Limits().max_documents; ++d) {
    spec.shape.cu_seqlens_q.push_back(d * 64);
  }
  spec.shape.cu_seqlens_k = spec.shape.cu_seqlens_q;
  PlanChoice choice;
  choice.recompute_forward = true;
  const std::clock_t begin = std::clock();  // processor time: other processes share the machine
  MustPlan(spec, choice, 8, Direction::kBackward);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, 2.0 * kTimeFactor);
}

TEST(PlannerTest, DilatedSegmentsThatFitAShardStayTogether) {
  AttentionSpec spec = Spec(100000, true);
  spec.options.dilation_levels = {{2048, 1, {}, 0, 8}, {25000, 4, {}, 0, 8}};
  Plan plan = MustPlan(spec, {}, 4);
  EXPECT_EQ(plan.shards.layout, Layout::kContiguous);
  EXPECT_TRUE(absl::StrContains(plan.reason, "segments fit a shard")) << plan.reason;
  // Segments that cross ranks are like other causal work.
  spec.options.dilation_levels[1].segment_length = 25001;
  plan = MustPlan(spec, {}, 4);
  EXPECT_EQ(plan.shards.layout, Layout::kZigzag);
  EXPECT_GT(plan.exchanged_bytes, 0);
}

// The maximum number of segments and ranks of a request.
TEST(PlannerTest, ManySegmentsArePlannedQuickly) {
  AttentionSpec spec = Spec(int64_t{1} << 20, true);
  spec.options.dilation_levels = {{16, 4, {}, 0, 8}};  // 2^16 segments of four offsets
  const auto begin = std::clock();
  const Plan plan = MustPlan(spec, {}, 64);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  std::printf("2^18 segments over 64 ranks: %.2f s\n", seconds);
  EXPECT_LT(seconds, 2.0 * kTimeFactor);
  EXPECT_EQ(plan.shards.world_size, 64);
}

TEST(PlannerTest, PlanningIsCancelled) {
  AttentionSpec spec = Spec(65536, true);
  spec.shape.packed = true;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 100, 65000, 65536};
  int asked = 0;
  int until = 1000000;
  PlanControl control;
  control.cancelled = [&] { return ++asked > until; };
  const auto status = [&] {
    return PlanRequest(spec, Direction::kForward, {}, Workers(4), control).status();
  };
  EXPECT_TRUE(status().ok());
  const int questions = std::exchange(asked, 0);
  EXPECT_GE(questions, 3);  // at least one per layout
  for (until = 0; until < questions; ++until) {
    asked = 0;
    EXPECT_EQ(status().code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(asked, until + 1);  // no poll after a cancellation
  }
}

TEST(PlannerTest, CostsAddUp) {
  const AttentionSpec spec = Spec(65536, true);
  const Plan ring = MustPlan(spec, {}, 4);
  PlanChoice choice;
  choice.schedule = ScheduleKind::kSingle;
  const Plan single = MustPlan(spec, choice, 4);
  const double pairs = 65536.0 * 65537.0 / 2;
  EXPECT_DOUBLE_EQ(ring.flops, FlopsOfPairs(spec, Direction::kForward, false, pairs));
  EXPECT_DOUBLE_EQ(single.flops, ring.flops);
  EXPECT_NEAR(ring.predicted_compute_seconds * 4, single.predicted_compute_seconds,
              0.01 * single.predicted_compute_seconds);
  ASSERT_EQ(ring.buffer_bytes.size(), 4u);
  EXPECT_LT(ring.buffer_bytes[0], 0.55 * single.buffer_bytes[0]);
  int64_t sent = 0;
  for (int64_t bytes : ring.sent_bytes) sent += bytes;
  EXPECT_EQ(ring.exchanged_bytes, sent);
  EXPECT_EQ(ring.step_count, 4);
  EXPECT_GT(ring.predicted_step_seconds, 0);
  EXPECT_LE(ring.predicted_step_seconds, ring.predicted_compute_seconds);
}

TEST(PlannerTest, RecomputingCostsMemoryAndTime) {
  const AttentionSpec spec = Spec(65536, true);
  PlanChoice choice;
  const Plan given = MustPlan(spec, choice, 4, Direction::kBackward);
  choice.recompute_forward = true;
  const Plan recomputed = MustPlan(spec, choice, 4, Direction::kBackward);
  EXPECT_GT(recomputed.flops, given.flops);
  EXPECT_GT(recomputed.buffer_bytes[0], given.buffer_bytes[0]);
}

TEST(PlannerTest, EmptyProblems) {
  EXPECT_EQ(MustPlan(Spec(0, false), {}, 2).recipe.schedule, ScheduleKind::kSingle);
  PlanChoice choice;
  choice.world_size = 2;
  const Plan plan = MustPlan(Spec(0, false), choice, 2, Direction::kBackward);
  EXPECT_EQ(plan.exchanged_bytes, 0);
  EXPECT_EQ(plan.flops, 0);
}

// A bias grows with the square of the tokens.
TEST(PlannerTest, ALargeBiasIsSpread) {
  AttentionSpec spec = Spec(16384, true);
  EXPECT_EQ(MustPlan(spec, {}, 4).shards.world_size, 1);
  spec.options.bias = BiasForm{.float32 = true};
  EXPECT_EQ(MustPlan(spec, {}, 4).shards.world_size, 1);  // 1 GiB
  spec.options.bias->gradient = true;
  const Plan plan = MustPlan(spec, {}, 4, Direction::kBackward);
  EXPECT_EQ(plan.shards.world_size, 4);
  EXPECT_NE(plan.reason.find("bias or mask"), std::string::npos) << plan.reason;
  EXPECT_EQ(MustPlan(spec, {}, 1, Direction::kBackward).shards.world_size, 1);
}

// The planner keeps the ring for a plain request with equal axes.
TEST(PlannerTest, EqualAxesStayARing) {
  for (bool causal : {false, true}) {
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      for (int64_t tokens : {40000, 65536, 1 << 20}) {
        for (double link : {1e7, 1e9, 1e11}) {
          PlannerInputs inputs = Workers(8);
          inputs.link_bytes_per_s = link;
          const auto plan = PlanRequest(Spec(tokens, causal), direction, {}, inputs);
          EXPECT_EQ(plan->recipe.schedule, ScheduleKind::kRing);
        }
      }
    }
  }
}

// Over a grid of axes and rates: by the model, the chosen schedule is at most 5% slower than the
// best schedule whose memory falls with the ring size. The test reports all exceptions.
TEST(PlannerTest, ChoosesTheScheduleWithLittleRegret) {
  struct Rates {
    const char* name;
    PlannerInputs inputs;
  };
  std::vector<Rates> rates = {
      {"nominal", Workers(8)}, {"slow links", Workers(8)}, {"gpu", Workers(8)}};
  rates[1].inputs.link_bytes_per_s = 1e8;
  rates[1].inputs.exchange_overhead_s = 1e-3;
  rates[2].inputs.device_flops_per_s = 5e14;
  rates[2].inputs.link_bytes_per_s = 2e11;
  rates[2].inputs.step_overhead_s = 1e-5;
  rates[2].inputs.exchange_overhead_s = 3e-5;
  int passing = 0, asked = 0;
  double best_gain = 1, worst_regret = 1, equal_regret = 1;
  double gather_gain = 1, replicated_gain = 1;
  for (const Rates& rate : rates) {
    for (Direction direction : {Direction::kForward, Direction::kBackward}) {
      for (int64_t keys : {int64_t{65536}, int64_t{1} << 19}) {
        for (int64_t ratio : {1, 2, 4, 8, 16, 64, 256, 4096}) {
          AttentionSpec spec = Spec(keys, true);
          spec.shape.seq_len_q = keys / ratio;
          spec.shape.cu_seqlens_q = {0, keys / ratio};
          const auto seconds = [&](ScheduleKind kind) {
            PlanChoice choice;
            choice.schedule = kind;
            return PlanRequest(spec, direction, choice, rate.inputs)->busiest_rank_seconds;
          };
          const Plan chosen = *PlanRequest(spec, direction, {}, rate.inputs);
          const double ring = seconds(ScheduleKind::kRing);
          const double pass_q = seconds(ScheduleKind::kPassQ);
          const double best = std::min(ring, pass_q);
          const double regret = chosen.busiest_rank_seconds / best;
          if (ratio == 1) {  // always a ring; overheads of many steps may count
            EXPECT_EQ(chosen.recipe.schedule, ScheduleKind::kRing);
            equal_regret = std::max(equal_regret, regret);
            continue;
          }
          EXPECT_LE(regret, 1.05) << rate.name << " 1/" << ratio << " of " << keys;
          const bool passes = chosen.recipe.schedule == ScheduleKind::kPassQ;
          EXPECT_EQ(absl::StrContains(chosen.reason, "pass_q"), passes) << chosen.reason;
          ++asked;
          passing += passes;
          best_gain = std::max(best_gain, ring / chosen.busiest_rank_seconds);
          worst_regret = std::max(worst_regret, regret);
          gather_gain = std::max(gather_gain, best / seconds(ScheduleKind::kAllGather));
          replicated_gain = std::max(replicated_gain, best / seconds(ScheduleKind::kReplicatedQ));
        }
      }
    }
  }
  std::printf(
      "pass_q chosen %d of %d times, at most %.2f times as fast as the ring; regret %.3f "
      "(%.3f of equal axes); on request only: all_gather at most %.2f and replicated_q %.2f times "
      "as fast\n",
      passing, asked, best_gain, worst_regret, equal_regret, gather_gain, replicated_gain);
  EXPECT_GT(passing, 10);
  EXPECT_GT(best_gain, 1.5);
}

TEST(PlannerTest, PassQIsChosenOnlyForWhatItTakes) {
  AttentionSpec spec = Spec(1 << 19, true);
  spec.shape.seq_len_q = 1024;
  spec.shape.cu_seqlens_q = {0, 1024};
  PlannerInputs inputs = Workers(8);
  inputs.link_bytes_per_s = 1e7;
  const auto schedule = [&](const PlanChoice& choice) {
    return PlanRequest(spec, Direction::kForward, choice, inputs)->recipe.schedule;
  };
  EXPECT_EQ(schedule({}), ScheduleKind::kPassQ);
  PlanChoice ring;
  ring.schedule = ScheduleKind::kRing;
  EXPECT_EQ(schedule(ring), ScheduleKind::kRing);
  PlanChoice one;
  one.world_size = 1;
  EXPECT_EQ(schedule(one), ScheduleKind::kSingle);
  spec.options.deterministic = true;
  const ScheduleKind nominal = schedule({});
  for (double link : {1e6, 1e12}) {
    inputs.link_bytes_per_s = link;
    EXPECT_EQ(schedule({}), nominal);
  }
  inputs.link_bytes_per_s = 1e7;
  spec.options.deterministic = false;
  spec.options.mask = MaskForm{};
  EXPECT_EQ(schedule({}), ScheduleKind::kRing);
}

// Memory and time with heads_per_step are those of the program.
TEST(PlannerTest, HeadsPerStepIsPlannedAsAsked) {
  AttentionSpec spec = Spec(65536, true);
  spec.shape.num_kv_heads = 8;
  PlanChoice choice;
  choice.schedule = ScheduleKind::kAllGather;
  const Plan all = MustPlan(spec, choice, 8);
  choice.heads_per_step = 1;
  const Plan one = MustPlan(spec, choice, 8);
  EXPECT_EQ(one.recipe.heads_per_step, 1);
  EXPECT_DOUBLE_EQ(one.flops, all.flops);
  EXPECT_EQ(one.exchanged_bytes, all.exchanged_bytes);
  EXPECT_LT(one.buffer_bytes[0], 0.55 * all.buffer_bytes[0]);
  EXPECT_TRUE(absl::StrContains(one.reason, "1 kv head at a time")) << one.reason;
  choice.world_size = 1;  // nothing is gathered
  EXPECT_EQ(MustPlan(spec, choice, 8).recipe.schedule, ScheduleKind::kSingle);
  EXPECT_EQ(MustPlan(spec, choice, 8).recipe.heads_per_step, 0);
}

// limits.h states that no size of a valid tensor overflows.
TEST(LimitsTest, ProductsOfLegalDimensionsFit) {
  const Limits limits;
  // Sizes saturate, so that those above the limit stay above it.
  EXPECT_LT(limits.max_request_bytes, kSaturatedBytes);
  EXPECT_LT(static_cast<__int128>(limits.max_tokens) * limits.max_tokens,
            static_cast<__int128>(std::numeric_limits<int64_t>::max()));
  EXPECT_LT(limits.max_tokens, int64_t{1} << 28);  // four varint bytes
  EXPECT_LE(2 * 4 * (limits.max_documents + 1) + limits.max_inline_bytes, limits.max_header_bytes);
}

}  // namespace
}  // namespace ringattn

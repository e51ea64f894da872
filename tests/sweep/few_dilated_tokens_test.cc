// Dilated levels of documents with fewer tokens than their rates, so that most offsets select
// nothing and many ranks have nothing: on every schedule, what the oracle says.
#include <limits>

#include "gtest/gtest.h"
#include "tests/sweep/run_problem.h"

namespace ringattn::tests {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

AttentionSpec SpecOf(std::vector<int64_t> cu_seqlens) {
  AttentionSpec spec;
  spec.shape = {.packed = cu_seqlens.size() > 2,
                .batch = cu_seqlens.size() > 2 ? 1 : 2,
                .seq_len_q = cu_seqlens.back(),
                .seq_len_kv = cu_seqlens.back(),
                .num_heads = 8,
                .num_kv_heads = 4,
                .head_dim = 16,
                .head_dim_v = 8,
                .cu_seqlens_q = cu_seqlens,
                .cu_seqlens_k = cu_seqlens};
  spec.options.softmax_scale = 0.25;
  spec.has_dlse = true;
  return spec;
}

// Per-head offsets, of which 5, 6 and 7 of a rate of 8 are beyond five tokens; segments shorter
// than the rate; an offset that no token has, alone and next to a level that selects everything.
std::vector<std::vector<DilationLevel>> Levels() {
  return {{{64, 8, {}, 0, 8}},
          {{3, 7, {}, 0, 8}},
          {{64, 64, 63, 0, 8}},
          {{64, 64, 63, 0, 8}, {64, 1, {}, 0, 8}},
          {{2, 6, {}, 0, 8}, {64, 11, {}, 2, 7}}};
}

std::vector<AttentionSpec> Specs() {
  std::vector<AttentionSpec> specs;
  for (const std::vector<int64_t>& cu_seqlens : std::vector<std::vector<int64_t>>{
           {0, 1}, {0, 2}, {0, 5}, {0, 1, 1, 3, 4, 9}, {0, 0, 4, 4}}) {
    for (const std::vector<DilationLevel>& levels : Levels()) {
      AttentionSpec spec = SpecOf(cu_seqlens);
      spec.options.dilation_levels = levels;
      specs.push_back(spec);
      spec.options.causal = true;
      spec.options.sinks = true;
      spec.options.dropout = {.threshold = 9000, .seed = 5};
      spec.dtype = DType::kBFloat16;
      specs.push_back(spec);
    }
  }
  return specs;
}

TEST(FewDilatedTokens, AreTheOraclesOnEverySchedule) {
  int64_t empty_rows = 0, all_rows = 0;
  for (const AttentionSpec& spec : Specs()) {
    const oracle::InputTensors inputs =
        oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 41, true);
    const oracle::Result expected = oracle::EvaluateAll(spec, inputs.view());
    if (!spec.options.sinks) {
      for (const double lse : expected.lse.exact) empty_rows += lse == -kInfinity;
      all_rows += static_cast<int64_t>(expected.lse.exact.size());
    }
    Case c;
    c.spec = spec;
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      c.direction = direction;
      for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
        c.layout = layout;
        for (const int world_size : {1, 2, 8}) {
          c.world_size = world_size;
          for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather,
                                              ScheduleKind::kPassQ, ScheduleKind::kReplicatedQ}) {
            if (world_size == 1 && schedule != ScheduleKind::kRing) continue;
            c.schedule = schedule;
            c.recompute_forward = direction == Direction::kBackward && !c.recompute_forward;
            SCOPED_TRACE(testing::Message()
                         << (direction == Direction::kForward ? "forward " : "backward ")
                         << LayoutName(layout) << " " << ScheduleKindName(schedule) << " of "
                         << ToString(c));
            const CaseResult result =
                RunCase(c, inputs, expected, Engine::kExecutor, KernelSet::kCpu);
            ASSERT_TRUE(result.status.ok()) << result.status;
            EXPECT_TRUE(result.report.passed()) << result.report.ToString();
          }
        }
      }
    }
  }
  // The cases are what they are meant to be.
  EXPECT_GT(empty_rows, all_rows / 2);
  EXPECT_LT(empty_rows, all_rows);
}

}  // namespace
}  // namespace ringattn::tests

// A batch of no rows: empty results, and gradients of zero for the tensors that all batch rows
// share, on every schedule.
#include "gtest/gtest.h"
#include "tests/sweep/run_problem.h"

namespace ringattn::tests {
namespace {

AttentionSpec PlainSpec() {
  AttentionSpec spec;
  spec.shape = {.batch = 0,
                .seq_len_q = 21,
                .seq_len_kv = 33,
                .num_heads = 4,
                .num_kv_heads = 2,
                .head_dim = 16,
                .head_dim_v = 24,
                .cu_seqlens_q = {0, 21},
                .cu_seqlens_k = {0, 33}};
  spec.options.softmax_scale = 0.25;
  spec.options.causal = true;
  return spec;
}

std::vector<AttentionSpec> Specs() {
  std::vector<AttentionSpec> specs = {PlainSpec(), PlainSpec()};
  AttentionSpec& all = specs.back();
  all.dtype = DType::kBFloat16;
  all.has_dlse = true;
  all.options.sinks = true;
  all.options.segment_ids = true;
  all.options.dropout = {.threshold = 9000, .seed = 5};
  all.options.bias = BiasForm{.per_batch = false, .per_head = true, .gradient = true};
  all.options.mask = MaskForm{.per_batch = true, .per_head = false, .bits = false};
  specs.push_back(PlainSpec());
  specs.back().shape.seq_len_kv = 21;
  specs.back().shape.cu_seqlens_k = {0, 21};
  specs.back().options.dilation_levels = {{4, 2, {}, 0, 4}, {16, 1, {}, 0, 4}};
  return specs;
}

TEST(EmptyBatch, GivesEmptyResultsOnEverySchedule) {
  for (const AttentionSpec& spec : Specs()) {
    const oracle::InputTensors inputs =
        oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 41, true);
    const oracle::Result expected = oracle::EvaluateAll(spec, inputs.view());
    Case c;
    c.spec = spec;
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      c.direction = direction;
      for (const int world_size : {1, 3}) {
        c.world_size = world_size;
        for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather,
                                            ScheduleKind::kPassQ, ScheduleKind::kReplicatedQ}) {
          if (world_size == 1 && schedule != ScheduleKind::kRing) continue;
          c.schedule = schedule;
          SCOPED_TRACE(testing::Message()
                       << (direction == Direction::kForward ? "forward " : "backward ")
                       << ScheduleKindName(schedule) << " of " << ToString(c));
          const CaseResult result =
              RunCase(c, inputs, expected, Engine::kExecutor, KernelSet::kCpu);
          ASSERT_TRUE(result.status.ok()) << result.status;
          EXPECT_TRUE(result.report.passed()) << result.report.ToString();
          for (const auto& [id, tensor] : result.outputs) {
            // Zeros may be negative: sums of nothing are subtracted.
            for (const uint8_t byte : tensor) ASSERT_EQ(byte & 0x7f, 0) << TensorName(id);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::tests

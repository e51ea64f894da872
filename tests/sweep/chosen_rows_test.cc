// Properties of chosen rows' probabilities, and of tuned kernels, for all inputs.
#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "tests/sweep/solve.h"
#include "worker/device/cpu/cpu_device.h"

namespace ringattn::tests {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Sinks, ALiBi, a mask and dropout, over documents of which one has no queries, one no keys.
AttentionSpec Documents(DType dtype) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.shape = {.packed = true,
                .seq_len_q = 130,
                .seq_len_kv = 150,
                .num_heads = 4,
                .num_kv_heads = 2,
                .head_dim = 16,
                .head_dim_v = 16,
                .cu_seqlens_q = {0, 50, 50, 60, 130},
                .cu_seqlens_k = {0, 60, 70, 70, 150}};
  spec.options.softmax_scale = 0.25;
  spec.options.causal = true;
  spec.options.sinks = true;
  spec.options.alibi_slopes = {0.1f, 0.2f, 0.3f, 0.4f};
  spec.options.mask = MaskForm{false, true, true};
  spec.options.dropout.threshold = 6554;
  spec.options.dropout.seed = 3;
  spec.probability_rows = {{3, 69}, {0, 0}, {0, 49}, {2, 5}, {3, 0}, {0, 49}};
  return spec;
}

TensorMap Forward(const AttentionSpec& spec, const Placement& placement, const TensorMap& inputs,
                  KernelSet kernels = KernelSet::kCpu) {
  auto outputs =
      RunProblem(spec, placement, Direction::kForward, false, inputs, Engine::kExecutor, kernels);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return outputs.ok() ? *std::move(outputs) : TensorMap{};
}

std::vector<Placement> Placements() {
  std::vector<Placement> placements = {{Layout::kContiguous, 1, 1, ScheduleKind::kSingle}};
  for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather}) {
    for (const Layout layout :
         {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kZigzagPerDocument}) {
      for (const int world_size : {2, 3, 8})
        placements.push_back({layout, world_size, 1, schedule});
    }
  }
  return placements;
}

// Chosen rows equal the oracle's on every ring, layout and schedule, with all terms; with the sink
// a row's weights sum to 1.
TEST(ChosenRows, AreTheOraclesOnEveryRing) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const AttentionSpec spec = Documents(dtype);
    const oracle::InputTensors drawn =
        oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 5, false);
    const oracle::Result expected = oracle::EvaluateAll(spec, drawn.view());
    const TensorMap inputs = ToTensorMap(drawn);
    for (const Placement& placement : Placements()) {
      SCOPED_TRACE(testing::Message() << LayoutName(placement.layout) << " " << placement.world_size
                                      << " " << static_cast<int>(placement.schedule));
      for (const KernelSet kernels : {KernelSet::kCpu, KernelSet::kNaive}) {
        const TensorMap outputs = Forward(spec, placement, inputs, kernels);
        const oracle::Report report = oracle::Compare(spec, expected, ToOutputs(outputs));
        EXPECT_TRUE(report.passed()) << report.ToString();
        EXPECT_EQ(report.tensors.back().tensor, TensorId::kProbabilities);
        EXPECT_EQ(report.tensors.back().rows, 6 * 4);
        const std::vector<float> p = Floats(outputs.at(TensorId::kProbabilities));
        const std::vector<float> lse = Floats(outputs.at(TensorId::kLse));
        ASSERT_EQ(p.size(), 6u * 4 * 80);
        for (size_t row = 0; row < 6; ++row) {
          const ProbabilityRow& chosen = spec.probability_rows[row];
          const int64_t token = spec.shape.cu_seqlens_q[chosen.batch] + chosen.position;
          for (size_t h = 0; h < 4; ++h) {
            const float whole = lse[h * 130 + token];
            // Without keys and a sink there is nothing to share.
            const bool has_sink = drawn.sinks[h] != kMinusInfinity;
            double sum = has_sink ? std::exp(drawn.sinks[h] - whole) : 0.0;
            for (size_t j = 0; j < 80; ++j) sum += p[(row * 4 + h) * 80 + j];
            EXPECT_NEAR(sum, whole == kMinusInfinity ? 0.0 : 1.0, 1e-4);
          }
        }
      }
    }
  }
}

// Weights times v is out, where nothing is dropped.
// Scores of 1e6 to 1e30, which fp32 holds in steps of more than 1: with an lse of other additions a
// weight of 1 came out as anything from 0 to infinity.
TEST(ChosenRows, OfScoresBeyondFp32sStepsAddUpToOne) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    AttentionSpec spec = Documents(dtype);
    spec.options.sinks = false;
    spec.options.dropout = {};
    const TensorMap inputs =
        ToTensorMap(oracle::GenerateInputs(spec, oracle::DataKind::kVastScores, 7, false));
    for (const Placement& placement : Placements()) {
      const TensorMap outputs = Forward(spec, placement, inputs);
      const std::vector<float> weights = Floats(outputs.at(TensorId::kProbabilities));
      const size_t rows = spec.probability_rows.size() * spec.shape.num_heads;
      const size_t columns = weights.size() / rows;
      size_t whole = 0;
      for (size_t row = 0; row < rows; ++row) {
        double sum = 0;
        for (size_t j = 0; j < columns; ++j) sum += weights[row * columns + j];
        whole += std::abs(sum - 1) < 1e-5 ? 1 : 0;
        EXPECT_TRUE(std::abs(sum - 1) < 1e-5 || sum == 0)  // of a row without keys
            << DTypeName(dtype) << " row " << row << ": " << sum;
      }
      EXPECT_GE(whole, rows / 2);
    }
  }
}

TEST(ChosenRows, TimesTheValuesAreTheResult) {
  AttentionSpec spec = Documents(DType::kFloat32);
  spec.options.dropout = {};
  const TensorMap inputs =
      ToTensorMap(oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 6, false));
  const TensorMap outputs = Forward(spec, {Layout::kZigzag, 3}, inputs);
  const std::vector<float> p = Floats(outputs.at(TensorId::kProbabilities));
  const std::vector<float> out = Floats(outputs.at(TensorId::kOut));
  const std::vector<float> v = Floats(inputs.at(TensorId::kV));
  for (size_t row = 0; row < spec.probability_rows.size(); ++row) {
    const ProbabilityRow& chosen = spec.probability_rows[row];
    const int64_t q_begin = spec.shape.cu_seqlens_q[chosen.batch] + chosen.position;
    const int64_t k_begin = spec.shape.cu_seqlens_k[chosen.batch];
    const int64_t keys = spec.shape.cu_seqlens_k[chosen.batch + 1] - k_begin;
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t d = 0; d < 16; ++d) {
        double sum = 0;
        for (int64_t j = 0; j < keys; ++j) {
          sum += p[(row * 4 + h) * 80 + j] * v[((k_begin + j) * 2 + h / 2) * 16 + d];
        }
        EXPECT_NEAR(sum, out[(q_begin * 4 + h) * 16 + d], 2e-5);
      }
    }
  }
}

// Requesting them changes no other bit, and a key that no row sees has 0 for every input.
TEST(ChosenRows, ChangeNothingElse) {
  AttentionSpec spec = Documents(DType::kFloat32);
  spec.options.mask.reset();
  TensorMap inputs = ToTensorMap(oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 7, false));
  const TensorMap with = Forward(spec, {Layout::kZigzag, 3}, inputs);
  AttentionSpec without = spec;
  without.probability_rows.clear();
  const TensorMap plain = Forward(without, {Layout::kZigzag, 3}, inputs);
  EXPECT_EQ(with.at(TensorId::kOut), plain.at(TensorId::kOut));
  EXPECT_EQ(with.at(TensorId::kLse), plain.at(TensorId::kLse));
  EXPECT_EQ(plain.count(TensorId::kProbabilities), 0u);
  // A row of a document without keys, and keys after the document's end.
  const std::vector<float> p = Floats(with.at(TensorId::kProbabilities));
  for (size_t h = 0; h < 4; ++h) {
    for (size_t j = 0; j < 80; ++j) EXPECT_EQ(p[(3 * 4 + h) * 80 + j], 0.0f);
    for (size_t j = 60; j < 80; ++j) EXPECT_EQ(p[(1 * 4 + h) * 80 + j], 0.0f);
  }
}

// Every value that the device offers, in both directions: what the oracle says.
TEST(Tuning, EveryOfferedTileIsRight) {
  const worker::TuningChoices offer = worker::CpuDevice(1, 1 << 20).tuning_offer();
  ASSERT_GE(offer.tile_q.size(), 3u);
  ASSERT_GE(offer.tile_kv.size(), 3u);
  EXPECT_EQ(offer.key_splits, std::vector<int32_t>{1});
  std::vector<Case> cases = GenerateCases(11, 12, 4'000'000);
  for (Case& c : cases) AddOptions(c);
  for (Case& c : cases) {
    const bool backward = c.direction == Direction::kBackward;
    const oracle::InputTensors drawn =
        oracle::GenerateInputs(c.spec, c.data, c.data_seed, backward);
    const oracle::Result expected = oracle::EvaluateAll(c.spec, drawn.view());
    const TensorMap inputs = ToTensorMap(drawn);
    for (const int32_t tile_q : offer.tile_q) {
      for (const int32_t tile_kv : offer.tile_kv) {
        Placement placement{c.layout, c.world_size, c.stripe,
                            c.world_size == 1 ? ScheduleKind::kSingle : c.schedule};
        if (c.world_size > 1) placement.group_size = c.group_size;
        placement.tuning = {tile_q, tile_kv, 1};
        auto outputs = RunProblem(c.spec, placement, c.direction, backward, inputs,
                                  Engine::kExecutor, KernelSet::kCpu);
        ASSERT_TRUE(outputs.ok()) << outputs.status();
        const oracle::Report report = oracle::Compare(c.spec, expected, ToOutputs(*outputs));
        EXPECT_TRUE(report.passed())
            << ToString(c) << " tile " << tile_q << " x " << tile_kv << "\n"
            << report.ToString();
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::tests

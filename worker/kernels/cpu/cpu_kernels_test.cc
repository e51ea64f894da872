#include "worker/kernels/cpu/cpu_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "worker/kernels/cpu/simd/tile_ops.h"
#include "worker/kernels/cpu/testing/kernel_runner.h"

namespace ringattn::worker {
namespace {

class DTypeTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, DTypeTest,
                         testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

TEST_P(DTypeTest, SizesAroundTiles) {
  for (int64_t sq : {1, 2, 7, 119, 121, 241, 300}) {
    for (int64_t sk : {1, 3, 127, 129, 257}) {
      TestShape shape = DenseShape(sq, sk, (sq + sk) % 2 == 0);
      shape.dtype = GetParam();
      SCOPED_TRACE(testing::Message() << sq << " x " << sk);
      Check(shape);
    }
  }
}

// Enough keys, rows and heads for several tiles of the largest sizes, which
// small problems do not get.
TEST_P(DTypeTest, SeveralLargeTiles) {
  for (int64_t sk : {1023, 1025, 2100}) {
    TestShape shape = DenseShape(50, sk, sk % 2 == 0);
    shape.dtype = GetParam();
    SCOPED_TRACE(sk);
    Check(shape);
  }
  TestShape shape = DenseShape(500, 400, true);
  shape.dtype = GetParam();
  shape.heads = shape.kv_heads = 32;
  shape.head_dim = shape.head_dim_v = 8;
  Check(shape);
}

TEST_P(DTypeTest, HeadDimensions) {
  for (int64_t d : {1, 2, 5, 16, 31, 64, 80, 96, 128, 192, 255, 256}) {
    for (int64_t dv : {1, 17, 64, 128, 256}) {
      TestShape shape = DenseShape(37, 53, true);
      shape.dtype = GetParam();
      shape.head_dim = d;
      shape.head_dim_v = dv;
      shape.scale = 1.0f / std::sqrt(static_cast<float>(d));
      SCOPED_TRACE(testing::Message() << "d " << d << " dv " << dv);
      Check(shape);
    }
  }
}

// The keys of multi-head latent attention, and rows around the end of the narrower ones.
TEST_P(DTypeTest, WideHeadDimensions) {
  for (auto [d, dv] : {std::pair{257, 256}, {256, 300}, {512, 512}, {576, 512}, {575, 576}}) {
    TestShape shape = DenseShape(37, 53, true);
    shape.dtype = GetParam();
    shape.head_dim = d;
    shape.head_dim_v = dv;
    shape.scale = 1.0f / std::sqrt(static_cast<float>(d));
    SCOPED_TRACE(testing::Message() << "d " << d << " dv " << dv);
    Check(shape);
  }
}

TEST_P(DTypeTest, GroupsAndBatches) {
  for (auto [heads, kv_heads] : {std::pair{4, 4}, {6, 2}, {8, 1}, {40, 1}}) {
    TestShape shape = DenseShape(70, 90, true);
    shape.dtype = GetParam();
    shape.batch = 2;
    shape.heads = heads;
    shape.kv_heads = kv_heads;
    shape.head_dim_v = 24;
    SCOPED_TRACE(testing::Message() << heads << "/" << kv_heads);
    Check(shape);
  }
}

TEST_P(DTypeTest, SoftcapNegativeScaleAndLargeScores) {
  TestShape shape = DenseShape(150, 140, false);
  shape.dtype = GetParam();
  shape.softcap = 5.0f;
  Check(shape, 3.0f);
  shape.softcap = 50.0f;
  shape.scale = -0.1f;
  Check(shape);
  shape.softcap = 0.0f;
  Check(shape);
  shape.scale = 0.0f;
  Check(shape);
}

TEST_P(DTypeTest, PiecesStridesAndBlocks) {
  TestShape shape = PiecesShape();
  shape.dtype = GetParam();
  Check(shape);
}

TEST_P(DTypeTest, ManyShortDocuments) {
  TestShape shape;
  shape.dtype = GetParam();
  shape.heads = 2;
  shape.bands.clear();
  shape.kv_rows = {0};
  shape.kv_pieces.resize(1);
  for (int64_t d = 0; d < 40; ++d) {
    AttentionOptions options;
    options.causal = true;
    const int64_t sq = d % 7;
    const int64_t sk = d % 5 * 3;
    shape.bands.push_back(DocumentBand(options, sq, sk));
    shape.q_pieces.push_back({shape.q_rows, sq, d, 0, 1});
    shape.kv_pieces[0].push_back({shape.kv_rows[0], sk, d, 0, 1});
    shape.q_rows += sq;
    shape.kv_rows[0] += sk;
  }
  Check(shape);
}

TEST_P(DTypeTest, NothingToDo) {
  for (auto [sq, sk] : {std::pair{0, 5}, {5, 0}, {0, 0}}) {
    TestShape shape = DenseShape(sq, sk, false);
    shape.dtype = GetParam();
    Check(shape);
  }
  TestShape no_blocks = DenseShape(9, 0, false);
  no_blocks.dtype = GetParam();
  no_blocks.kv_rows.clear();
  no_blocks.kv_pieces.clear();
  Check(no_blocks);
  TestShape empty_band = DenseShape(9, 9, false);
  empty_band.dtype = GetParam();
  empty_band.bands = {Band{3, 1}};
  Check(empty_band);
}

TEST_P(DTypeTest, EveryInstructionSet) {
  const int64_t all = hwy::SupportedTargets();
  for (int bit = 0; bit < 63; ++bit) {
    const int64_t target = int64_t{1} << bit;
    if ((all & target) == 0 || (HWY_TARGETS & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(cpu::TileOpsFor(GetParam()).name);
    TestShape shape = PiecesShape();
    shape.dtype = GetParam();
    shape.head_dim = 40;
    shape.head_dim_v = 19;
    Check(shape);
    shape.softcap = 2.0f;
    Check(shape);
  }
  hwy::SetSupportedTargetsForTest(0);
}

// Scores of +-1e4 that differ enough for one key to take all the weight.
TEST_P(DTypeTest, HugeScores) {
  TestShape shape = DenseShape(130, 130, true);
  shape.dtype = GetParam();
  shape.scale = 1.0f;
  TestData data(shape);
  for (int64_t i = 0; i < data.q.count; ++i) {
    data.q.Set(i, i % 16 == 0 ? 100.0f : 0.0f);
    data.k[0].Set(i, i % 16 == 0 ? static_cast<float>((i / 16 * 7) % 131 - 65) : 0.0f);
  }
  const Reference reference(data);
  CpuKernels kernels(2);
  ExpectForward(shape, RunForward(kernels, data, {1}), reference);
  ExpectBackward(shape, RunBackward(kernels, data, reference), reference);
}

TEST_P(DTypeTest, DeltaAddConvertZero) {
  TestShape shape = DenseShape(70, 1, false);
  shape.dtype = GetParam();
  shape.batch = 2;
  shape.heads = 3;
  shape.head_dim_v = 37;
  TestData data(shape);
  TestTensor out = MakeTensor(shape.dtype, data.dout.count);
  std::mt19937 random(3);
  FillRandom(out, random, 1.0f);
  CpuKernels kernels(3);
  Floats delta(2 * 3 * 70);
  RunOrDie(kernels, DeltaCall{&data.problem, 70, out.data(), data.dout.data(), delta.data()});
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 70; ++i) {
      for (int64_t h = 0; h < 3; ++h) {
        double exact = 0.0;
        for (int64_t e = 0; e < 37; ++e) {
          const int64_t at = ((b * 70 + i) * 3 + h) * 37 + e;
          exact += double{out.At(at)} * data.dout.At(at);
        }
        EXPECT_NEAR(delta[(b * 3 + h) * 70 + i], exact, 1e-5);
      }
    }
  }

  constexpr int64_t kCount = 300001;
  Floats values(kCount);
  for (int64_t i = 0; i < kCount; ++i)
    values[i] = std::bit_cast<float>(static_cast<uint32_t>(random()));
  TestTensor expected = MakeTensor(shape.dtype, kCount);
  ConvertFromFloat(shape.dtype, values.data(), expected.data(), kCount);
  TestTensor actual = MakeTensor(shape.dtype, kCount);
  RunOrDie(kernels, ConvertCall{shape.dtype, actual.data(), values.data(), kCount});
  for (int64_t i = 0; i < kCount; ++i) {
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(actual.At(i)))
          << i << ": " << std::hex << std::bit_cast<uint32_t>(values[i]);
    } else {
      ASSERT_EQ(actual.At(i), expected.At(i)) << values[i];
    }
  }
  Floats target(kCount, 1.0f);
  const Floats source(kCount, 0.5f);
  RunOrDie(kernels, AddCall{target.data(), source.data(), kCount});
  EXPECT_EQ(target, Floats(kCount, 1.5f));
  RunOrDie(kernels, ZeroCall{target.data(), kCount * 4});
  EXPECT_EQ(target, Floats(kCount, 0.0f));
}

// The definition in double for every result type; rows without keys; NaN; sinks; a target that is
// also an input.
TEST_P(DTypeTest, MergesPartials) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr int64_t kRows = 70, kHeads = 3, kDim = 37, kParts = 5;
  TestShape shape = DenseShape(kRows, 1, false);
  shape.dtype = GetParam();
  shape.batch = 2;
  shape.heads = kHeads;
  shape.head_dim_v = kDim;
  TestData data(shape);
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  const int64_t statistics = 2 * kHeads * kRows;
  std::vector<Floats> outs(kParts, Floats(statistics * kDim)), lses(kParts, Floats(statistics));
  for (int64_t p = 0; p < kParts; ++p) {
    for (float& x : outs[p]) x = normal(random);
    for (float& x : lses[p]) x = random() % 3 == 0 ? -kInfinity : 20.0f * normal(random);
    lses[p][3] = -kInfinity;
    lses[p][5] = 1e30f;
  }
  lses[2][7] = std::numeric_limits<float>::quiet_NaN();
  const Floats sinks = {-kInfinity, 0.5f, 3.0f};
  CpuKernels kernels(3);
  for (const bool final : {false, true}) {
    std::vector<Floats> part_outs = outs, part_lses = lses;
    TestTensor out = MakeTensor(shape.dtype, statistics * kDim);
    MergeCall call;
    call.problem = &data.problem;
    call.q_rows = kRows;
    for (int64_t p = 0; p < kParts; ++p) {
      call.parts.push_back({part_outs[p].data(), part_lses[p].data()});
    }
    call.final = final;
    call.sinks = sinks.data();
    call.out_acc = part_outs[1].data();
    call.lse = part_lses[1].data();
    call.out = shape.dtype == DType::kFloat32 ? part_outs[1].data() : out.data();
    RunOrDie(kernels, call);
    for (int64_t at = 0; at < statistics; ++at) {
      const int64_t h = at / kRows % kHeads;
      const int64_t vector = (at / kRows / kHeads * kRows + at % kRows) * kHeads + h;
      double max = final ? double{sinks[h]} : -kInfinity;
      for (const Floats& lse : lses) max = std::max(max, double{lse[at]});
      double sum = final && max > -kInfinity ? std::exp(sinks[h] - max) : 0.0;
      for (const Floats& lse : lses) sum += max > -kInfinity ? std::exp(lse[at] - max) : 0.0;
      if (at == 7) {
        EXPECT_TRUE(std::isnan(call.lse[at]));
        continue;
      }
      const double expected_lse = max > -kInfinity ? max + std::log(sum) : -kInfinity;
      if (expected_lse == -kInfinity) {
        EXPECT_EQ(call.lse[at], -kInfinity);
      } else {
        EXPECT_NEAR(call.lse[at], expected_lse, 1e-5 * (1 + std::abs(expected_lse)));
      }
      for (int64_t d = 0; d < kDim; ++d) {
        double expected = 0.0;
        for (int64_t p = 0; p < kParts && max > -kInfinity; ++p) {
          expected += std::exp(lses[p][at] - max) / sum * outs[p][vector * kDim + d];
        }
        const bool rounded = final && shape.dtype != DType::kFloat32;
        const float actual = rounded ? out.At(vector * kDim + d) : part_outs[1][vector * kDim + d];
        EXPECT_NEAR(actual, expected, rounded ? 2e-2 : 1e-5) << at;
      }
    }
  }
}

TEST(CpuKernelsTest, CopiesRuns) {
  CpuKernels kernels(2);
  for (const int64_t run_bytes : {1, 7, 64, 1000}) {
    constexpr int64_t kRuns = 40;
    const int64_t source_pitch = run_bytes + 13, target_pitch = run_bytes + 3;
    std::vector<uint8_t> source(kRuns * source_pitch), target(kRuns * target_pitch, 0xee);
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint8_t>(i * 31);
    RunOrDie(kernels,
             CopyCall{target.data(), source.data(), kRuns, run_bytes, source_pitch, target_pitch});
    for (int64_t r = 0; r < kRuns; ++r) {
      for (int64_t b = 0; b < target_pitch; ++b) {
        EXPECT_EQ(target[r * target_pitch + b],
                  b < run_bytes ? source[r * source_pitch + b] : 0xee);
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::worker

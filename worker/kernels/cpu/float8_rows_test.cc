// Forwards in e4m3 on the processor: what is rounded, to the bit, and what scales look at.
#include <cmath>
#include <limits>
#include <vector>

#include "common/oracle/numeric.h"
#include "gtest/gtest.h"
#include "worker/kernels/cpu/cpu_kernels.h"
#include "worker/kernels/cpu/testing/kernel_runner.h"
#include "worker/kernels/e4m3.h"

namespace ringattn::worker {
namespace {

// Every bf16 in e4m3's range, compared with the oracle's rounding, which shares no code.
TEST(E4m3, RoundsAsTheOracleDoes) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = BFloat16ToFloat(static_cast<uint16_t>(bits));
    if (!std::isfinite(x)) {
      EXPECT_TRUE(std::isnan(RoundToE4m3(x)));
    } else if (std::abs(x) <= kE4m3Max) {
      EXPECT_EQ(RoundToE4m3(x), oracle::RoundToE4m3(x)) << x;
    }
  }
}

TEST(E4m3, ScalesAreTheSmallestPowersOfTwoThatFit) {
  EXPECT_EQ(ScaleExponent(0.0f), 0);
  EXPECT_EQ(ScaleExponent(448.0f), 0);
  EXPECT_EQ(ScaleExponent(std::nextafter(448.0f, 449.0f)), 1);
  EXPECT_EQ(ScaleExponent(224.0f), -1);
  for (float x : {1e-20f, 0.3f, 1.0f, 77.0f, 1e30f, std::numeric_limits<float>::max()}) {
    const int e = ScaleExponent(x);
    EXPECT_LE(x, std::ldexp(448.0, e)) << x;
    EXPECT_GT(x, std::ldexp(448.0, e - 1)) << x;
  }
  EXPECT_EQ(ScaleExponent(1e-44f), -100);
}

TestShape Float8Shape(DType dtype, int64_t sq, int64_t sk, bool causal) {
  TestShape shape = DenseShape(sq, sk, causal);
  shape.dtype = dtype;
  shape.heads = 4;
  shape.kv_heads = 2;
  return shape;
}

float Rounded(float x, float largest) {
  const int e = ScaleExponent(largest);
  return std::ldexp(RoundToE4m3(std::ldexp(x, -e)), e);
}

float Largest(const TestTensor& tensor) {
  float largest = 0;
  for (int64_t i = 0; i < tensor.count; ++i) largest = std::max(largest, std::abs(tensor.At(i)));
  return largest;
}

// A query that sees one key: p is 1, out is its value rounded, and lse the score of rounded q and
// k.
TEST(Float8Forward, OneKeyGivesItsRoundedValue) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    TestShape shape = Float8Shape(dtype, 1, 1, false);
    shape.heads = shape.kv_heads = 1;
    for (uint32_t seed = 1; seed < 20; ++seed) {
      TestData data(shape, seed);
      data.problem.compute = ComputeDType::kFloat8E4M3;
      CpuKernels kernels(2);
      const ForwardResult result = RunForward(kernels, data, {1});
      double score = 0;
      int changed = 0;
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        const float v = Rounded(data.v[0].At(d), Largest(data.v[0]));
        EXPECT_EQ(result.out[d], v);
        changed += v != data.v[0].At(d);
        score += double{Rounded(data.q.At(d), Largest(data.q))} *
                 Rounded(data.k[0].At(d), Largest(data.k[0]));
      }
      EXPECT_GT(changed, shape.head_dim / 2);
      EXPECT_NEAR(result.lse[0], score * shape.scale, 1e-6 * (1 + std::abs(score)));
    }
  }
}

// Rows outside all pieces are not read; values that only some rows see do not affect other rows.
TEST(Float8Forward, RowsOutsidePiecesAreNotThere) {
  TestShape shape = Float8Shape(DType::kBFloat16, 40, 60, false);
  shape.q_pieces = {{0, 30, 0, 0, 1}};
  shape.kv_pieces = {{{5, 50, 0, 0, 1}}};
  shape.bands = {Band{}};
  TestData data(shape);
  data.problem.compute = ComputeDType::kFloat8E4M3;
  CpuKernels kernels(2);
  const ForwardResult before = RunForward(kernels, data, {1});
  for (TestTensor* tensor : {&data.k[0], &data.v[0]}) {
    for (int64_t i = 0; i < 5 * shape.kv_heads * 16; ++i) tensor->Set(i, 1e30f);
  }
  const ForwardResult after = RunForward(kernels, data, {1});
  EXPECT_EQ(before.lse, after.lse);
  EXPECT_EQ(before.out, after.out);
}

TEST(Float8Forward, WhatIsNotFiniteReachesRowsThatSeeIt) {
  for (const float poison : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    TestData data(Float8Shape(DType::kBFloat16, 50, 50, true));
    data.problem.compute = ComputeDType::kFloat8E4M3;
    CpuKernels kernels(2);
    const ForwardResult clean = RunForward(kernels, data, {1});
    data.v[0].Set((20 * 2 + 1) * 16, poison);  // key 20 of kv head 1
    const ForwardResult result = RunForward(kernels, data, {1});
    EXPECT_EQ(result.lse, clean.lse);
    for (int64_t i = 0; i < 50; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t d = 0; d < 16; ++d) {
          const int64_t at = (i * 4 + h) * 16 + d;
          if (i >= 20 && h >= 2 && d == 0) {
            EXPECT_TRUE(std::isnan(result.out[at])) << i;
          } else {
            EXPECT_EQ(result.out[at], clean.out[at]) << i << " " << h << " " << d;
          }
        }
      }
    }
  }
}

// Scales are powers of two, so scales per block round the same values to the same results.
TEST(Float8Forward, ScoresDoNotDependOnTheCut) {
  TestShape shape = PiecesShape();
  shape.dtype = DType::kBFloat16;
  TestData data(shape);
  data.problem.compute = ComputeDType::kFloat8E4M3;
  for (int64_t i = 0; i < data.k[1].count; ++i) data.k[1].Set(i, 0.3f * data.k[1].At(i));
  CpuKernels kernels(2);
  const ForwardResult whole = RunForward(kernels, data, {2});
  const ForwardResult cut = RunForward(kernels, data, {1, 1});
  for (size_t i = 0; i < whole.lse.size(); ++i) {
    if (std::isinf(whole.lse[i])) continue;
    EXPECT_NEAR(whole.lse[i], cut.lse[i], 2e-5) << i;
  }
}

}  // namespace
}  // namespace ringattn::worker

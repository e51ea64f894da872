// Finite inputs whose scores fp32 holds in steps above 1, or not at all.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/kernels/cpu/cpu_kernels.h"
#include "worker/kernels/cpu/testing/kernel_runner.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kDim = 16;
constexpr float kLargest = std::numeric_limits<float>::max();

class WideTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, WideTest,
                         testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

// Query i and key j are size times the unit vectors of i and j mod 16, later keys a little
// longer: exact products, and of the keys that a query sees one wins by far.
TestData WithWinners(const TestShape& shape, float size) {
  TestData data(shape);
  for (TestTensor* tensor : {&data.q, &data.k[0]}) {
    const bool keys = tensor == &data.k[0];
    const int64_t heads = keys ? shape.kv_heads : shape.heads;
    for (int64_t i = 0; i < tensor->count; ++i) {
      const int64_t row = i / kDim / heads;
      const float length = keys ? 1.0f + static_cast<float>(row % 64) / 64.0f : 1.0f;
      tensor->Set(i, i % kDim == row % kDim ? size * length : 0.0f);
    }
  }
  return data;
}

void ExpectFinite(const char* what, const Floats& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(std::isfinite(values[i])) << what << " element " << i << ": " << values[i];
  }
}

void ExpectFinite(const ForwardResult& forward, const BackwardResult& backward) {
  ExpectFinite("out", forward.out);
  ExpectFinite("lse", forward.lse);
  ExpectFinite("dq", backward.dq);
  ExpectFinite("dk", backward.dk[0]);
  ExpectFinite("dv", backward.dv[0]);
}

// dv was wrong by six orders from scores of 2e8 on, out NaN or 0 from 4e9.
TEST_P(WideTest, TheWinnerTakesAllWhateverTheScores) {
  const bool half = GetParam() == DType::kFloat16;
  for (int exponent = 6; exponent <= (half ? 14 : 62); exponent += half ? 1 : 4) {
    for (const float softcap : {0.0f, 1e7f}) {
      SCOPED_TRACE(testing::Message() << "scores of 2^" << 2 * exponent - 2 << " cap " << softcap);
      TestShape shape = DenseShape(60, 60, true);
      shape.dtype = GetParam();
      shape.heads = 2;
      shape.softcap = softcap;
      // Scores that a cap makes equal have no winner; below, an fp32 lse of scores that are
      // not exact costs p more than the bound here allows (docs/numerics.md has F for it).
      if (softcap > 0 && (exponent < 10 || exponent > 11)) continue;
      TestData data = WithWinners(shape, std::ldexp(1.0f, exponent));
      Reference reference(data);
      CpuKernels kernels(2);
      const ForwardResult forward = RunForward(kernels, data, {1});
      ExpectForward(shape, forward, reference);
      // A capped score is not exact, so backward takes the lse that belongs to it.
      if (softcap > 0) reference.lse.assign(forward.lse.begin(), forward.lse.end());
      ExpectBackward(shape, RunBackward(kernels, data, reference), reference);
    }
  }
}

// One key tile's maximum is narrow, the next one's wide: sums change what they are
// relative to.
TEST_P(WideTest, MaximaGrowOverTheThreshold) {
  TestShape shape = DenseShape(7, 4000, false);
  shape.dtype = GetParam();
  TestData data(shape);
  for (int64_t i = 0; i < data.q.count; ++i) data.q.Set(i, i % kDim == 0 ? 256.0f : 0.0f);
  for (int64_t j = 0; j < 4000; ++j) {
    // Scores of 64 * 2^(j / 250): steps of 2 to 2^13, each with neighbours below it.
    for (int64_t d = 0; d < kDim; ++d) {
      data.k[0].Set(j * kDim + d, d == 0 ? std::exp2(static_cast<float>(j / 250)) : 0.0f);
    }
    if (j % 250 != 0) data.k[0].Set(j * kDim, data.k[0].At(j * kDim) - 1.0f / 64);
  }
  const Reference reference(data);
  CpuKernels kernels(2);
  ExpectForward(shape, RunForward(kernels, data, {1}), reference);
}

// Keys of equal wide scores: forward divides their weight evenly. An fp32 lse cannot express how
// many
// there are, so backward may count each of them whole, never more.
TEST_P(WideTest, TiesAreSharedAndProbabilitiesStayBelowOne) {
  TestShape shape = DenseShape(40, 40, false);
  shape.dtype = GetParam();
  TestData data(shape);
  for (TestTensor* tensor : {&data.q, &data.k[0]}) {
    for (int64_t i = 0; i < tensor->count; ++i) tensor->Set(i, 16384.0f);
  }
  for (int64_t i = 0; i < data.dout.count; ++i) data.dout.Set(i, 1.0f);
  const Reference reference(data);
  CpuKernels kernels(2);
  ExpectForward(shape, RunForward(kernels, data, {1}), reference);
  const BackwardResult backward = RunBackward(kernels, data, reference);
  for (const float dv : backward.dv[0]) {
    EXPECT_GE(dv, 0.0f);
    EXPECT_LE(dv, 40.0f);
  }
}

// Products that do not fit fp32: the result does.
TEST_P(WideTest, ProductsBeyondFp32) {
  if (GetParam() == DType::kFloat16) GTEST_SKIP() << "no fp16 gets there";
  for (const int exponent : {64, 80, 120}) {
    for (const float softcap : {0.0f, 30.0f}) {
      SCOPED_TRACE(testing::Message() << "products of 2^" << 2 * exponent << " cap " << softcap);
      TestShape shape = DenseShape(60, 60, true);
      shape.dtype = GetParam();
      shape.softcap = softcap;
      TestData data = WithWinners(shape, std::ldexp(1.0f, exponent));
      Reference reference(data);
      CpuKernels kernels(2);
      const ForwardResult forward = RunForward(kernels, data, {1});
      ExpectClose("out", shape.dtype, forward.out, reference.out, kDim);
      const bool lse_fits = softcap > 0 || exponent == 64;
      if (lse_fits) {
        ExpectLseClose(forward.lse, reference);
      } else {
        EXPECT_EQ(forward.lse[59], kLargest);
      }
      reference.lse.assign(forward.lse.begin(), forward.lse.end());
      const BackwardResult backward = RunBackward(kernels, data, reference);
      ExpectFinite(forward, backward);
      // Where it does not, every key whose score does not fit counts whole.
      if (lse_fits) ExpectClose("dv", shape.dtype, backward.dv[0], reference.dv[0], kDim);
    }
  }
}

// The signs cancel: an intermediate overflow must leave neither infinity nor NaN.
TEST_P(WideTest, SumsThatOverflowOnTheWay) {
  if (GetParam() == DType::kFloat16) GTEST_SKIP() << "no fp16 gets there";
  TestShape shape = DenseShape(50, 50, true);
  shape.dtype = GetParam();
  for (const bool cap : {false, true}) {
    shape.softcap = cap ? 20.0f : 0.0f;
    TestData data(shape);
    for (int64_t i = 0; i < data.q.count; ++i) {
      data.q.Set(i, std::ldexp(1.0f, 70));
      data.k[0].Set(i, std::ldexp(i % 2 == 0 ? 1.0f : -1.0f, 70));
    }
    const Reference reference(data);  // all scores 0
    CpuKernels kernels(2);
    const ForwardResult forward = RunForward(kernels, data, {1});
    ExpectForward(shape, forward, reference);
    const BackwardResult backward = RunBackward(kernels, data, reference);
    ExpectFinite(forward, backward);
    ExpectClose("dv", shape.dtype, backward.dv[0], reference.dv[0], kDim);
  }
}

// Values near the largest there is: means of them fit.
TEST_P(WideTest, ValuesAndGradientsNearTheLargest) {
  TestShape shape = DenseShape(50, 50, true);
  shape.dtype = GetParam();
  const float largest = GetParam() == DType::kFloat16 ? 65504.0f : 3e38f;
  TestData data(shape);
  for (int64_t i = 0; i < data.v[0].count; ++i) data.v[0].Set(i, i % 3 == 0 ? -largest : largest);
  for (int64_t i = 0; i < data.dout.count; ++i) {
    data.dout.Set(i, GetParam() == DType::kFloat16 ? 100.0f : i % 2 == 0 ? 1e30f : -1e30f);
  }
  Reference reference(data);
  CpuKernels kernels(2);
  const ForwardResult forward = RunForward(kernels, data, {1});
  ExpectForward(shape, forward, reference);
  for (float& delta : reference.delta) {
    if (!std::isfinite(delta)) delta = kLargest;
  }
  const BackwardResult backward = RunBackward(kernels, data, reference);
  for (const Floats* values : {&backward.dq, &backward.dk[0], &backward.dv[0]}) {
    for (const float value : *values) EXPECT_FALSE(std::isnan(value));
  }
}

// delta of rows whose products do not fit fp32.
TEST_P(WideTest, DeltaIsFinite) {
  if (GetParam() == DType::kFloat16) GTEST_SKIP() << "no fp16 gets there";
  TestShape shape = DenseShape(3, 3, false);
  shape.dtype = GetParam();
  TestData data(shape);
  TestTensor out = MakeTensor(GetParam(), data.dout.count);
  const float signs[] = {1.0f, -1.0f, 0.5f};
  for (int64_t i = 0; i < out.count; ++i) {
    out.Set(i, 1e30f);
    // Sums of +inf, of NaN on the way, and beyond fp32 for good.
    data.dout.Set(i, 1e30f * (i / kDim == 0 && i % 2 == 1 ? -1.0f : signs[i / kDim]));
  }
  Floats delta(3, NAN);
  DeltaCall call;
  call.problem = &data.problem;
  call.q_rows = 3;
  call.out = out.data();
  call.dout = data.dout.data();
  call.delta = delta.data();
  CpuKernels kernels(1);
  RunOrDie(kernels, call);
  EXPECT_EQ(delta, (Floats{0.0f, -kLargest, kLargest}));
}

}  // namespace
}  // namespace ringattn::worker

// The gradient of the bias, with the backward and alone, compared with the naive kernels.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/kernels/cpu/testing/kernel_runner.h"
#include "worker/kernels/naive/naive_kernels.h"

namespace ringattn::worker {
namespace {

struct BiasShape {
  const char* name;
  DType dtype = DType::kFloat32;
  BiasForm bias;
  bool at_once = true;
  float softcap = 0.0f;
  int64_t key_stride = 1;  // positions from key to key
  float magnitude = 1.0f;
};

// 130 queries and 450 keys, causal, 2 batch rows of 4 heads, with a mask and dropout.
class BiasGradientTest : public testing::TestWithParam<BiasShape> {
 protected:
  static constexpr int64_t kRows = 130, kKeys = 450, kBatch = 2, kHeads = 4;

  void SetUp() override {
    const BiasShape& form = GetParam();
    columns_ = kKeys * form.key_stride;
    TestShape shape = DenseShape(kRows, kKeys, /*causal=*/false);
    shape.dtype = form.dtype;
    shape.batch = kBatch;
    shape.heads = kHeads;
    shape.kv_heads = 2;
    shape.head_dim = 40;
    shape.head_dim_v = 24;
    shape.softcap = form.softcap;
    shape.bands = {Band{.upper = columns_ - kRows}};
    shape.kv_pieces = {{Piece{.length = kKeys, .stride = form.key_stride}}};
    data_.emplace(shape, /*seed=*/5, form.magnitude);
    ScoreTerms& terms = data_->problem.terms;
    terms.shifts = {0};
    terms.columns = columns_;
    terms.bias = form.bias;
    terms.mask = MaskForm{};
    terms.dropout = {.threshold = 6554, .seed = 1};
    const int64_t planes = (form.bias.per_batch ? kBatch : 1) * (form.bias.per_head ? kHeads : 1);
    bias_ = MakeTensor(BiasType(), planes * kRows * columns_);
    std::mt19937 random(3);
    FillRandom(bias_, random, 1.0f);
    mask_.resize(kRows * columns_);
    for (uint8_t& byte : mask_) byte = random() % 4 != 0;
    // A row that sees nothing of its first tile, and one that the forward says saw nothing at all.
    std::fill_n(mask_.begin() + 3 * columns_, columns_ - columns_ / 10, uint8_t{0});
    lse_.resize(kBatch * kHeads * kRows);
    delta_.resize(lse_.size());
    for (float& value : delta_) value = 1e-9f * static_cast<float>(random());
    Forward();
    lse_[7] = -std::numeric_limits<float>::infinity();
  }

  DType BiasType() const { return GetParam().bias.float32 ? DType::kFloat32 : GetParam().dtype; }
  TermOperands Operands() const { return {bias_.data(), mask_.data(), nullptr}; }

  void Forward() {
    TestTensor out = MakeTensor(GetParam().dtype, data_->dout.count);
    ForwardCall call;
    call.problem = &data_->problem;
    call.q_rows = kRows;
    call.q_pieces = data_->shape.q_pieces;
    call.q = data_->q.data();
    call.blocks = data_->Blocks();
    call.lse = lse_.data();
    call.out = out.data();
    call.terms = Operands();
    call.initial = call.final = true;
    RunNaively(call);
  }

  BackwardCall Backward() {
    dq_.assign(data_->q.count, 0.0f);
    dk_ = {std::vector<float>(data_->k[0].count)};
    dv_ = {std::vector<float>(data_->v[0].count)};
    BackwardCall call;
    call.problem = &data_->problem;
    call.q_rows = kRows;
    call.q_pieces = data_->shape.q_pieces;
    call.q = data_->q.data();
    call.dout = data_->dout.data();
    call.lse = lse_.data();
    call.delta = delta_.data();
    call.dq_acc = dq_.data();
    call.blocks = data_->Blocks(&dk_, &dv_);
    call.terms = Operands();
    return call;
  }

  BiasGradientCall Gradient(TestTensor& dbias) {
    dbias = MakeTensor(BiasType(), bias_.count);
    for (int64_t e = 0; e < dbias.count; ++e) dbias.Set(e, NAN);
    const BackwardCall backward = Backward();
    return {backward.problem, kRows,          backward.q_pieces, backward.q,     backward.dout,
            backward.lse,     backward.delta, data_->Blocks(),   backward.terms, dbias.data()};
  }

  int64_t columns_ = 0;
  std::optional<TestData> data_;
  TestTensor bias_;
  std::vector<uint8_t> mask_;
  std::vector<float> lse_, delta_, dq_;
  std::vector<std::vector<float>> dk_, dv_;
};

TEST_P(BiasGradientTest, IsTheNaiveOneAndTheSameByItselfAndWithTheBackward) {
  TestTensor expected, alone, together;
  RunNaively(Gradient(expected));
  CpuKernels kernels(/*threads=*/2);
  RunOrDie(kernels, Gradient(alone));
  const BiasGradientCall gradient = Gradient(together);
  const BackwardCall backward = Backward();
  EXPECT_EQ(CpuKernels::HasBothAtOnce(backward, gradient), GetParam().at_once);
  const std::atomic<bool> stop{false};
  std::atomic<int64_t> tiles{0}, work{0}, work_apart{0};
  ASSERT_TRUE(kernels.RunGradients(backward, gradient, stop, &tiles, &work).ok());
  const std::vector<float> dq = dq_, dk = dk_[0], dv = dv_[0];
  EXPECT_EQ(together.bytes, alone.bytes);
  double largest = 0;
  for (int64_t e = 0; e < expected.count; ++e) {
    if (!std::isnan(expected.At(e))) largest = std::max(largest, std::abs(double{expected.At(e)}));
  }
  const double bound = (GetParam().dtype == DType::kFloat32 ? 1e-5 : 1e-2) * largest;
  for (int64_t e = 0; e < expected.count; ++e) {
    if (std::isnan(expected.At(e))) {
      ASSERT_TRUE(std::isnan(alone.At(e))) << e;
    } else {
      ASSERT_NEAR(alone.At(e), expected.At(e), bound) << e;
    }
  }

  // And the backward's own results are those without it.
  const BackwardCall again = Backward();
  ASSERT_TRUE(kernels.Run(again, stop, &tiles, &work_apart).ok());
  EXPECT_EQ(dq_, dq);
  EXPECT_EQ(dk_[0], dk);
  EXPECT_EQ(dv_[0], dv);
  TestTensor unused;
  ASSERT_TRUE(kernels.Run(Gradient(unused), stop, &tiles, &work_apart).ok());
  EXPECT_EQ(work.load(), work_apart.load());
}

constexpr BiasForm kOfEachHead{.per_batch = true, .per_head = true, .gradient = true};

BiasForm With(BiasForm form, bool float32, bool before_softcap) {
  form.float32 = float32;
  form.before_softcap = before_softcap;
  return form;
}

INSTANTIATE_TEST_SUITE_P(
    All, BiasGradientTest,
    testing::Values(
        BiasShape{"fp32", DType::kFloat32, kOfEachHead},
        BiasShape{"bf16", DType::kBFloat16, kOfEachHead},
        BiasShape{"fp16", DType::kFloat16, kOfEachHead},
        BiasShape{"bf16_bias_of_fp32", DType::kBFloat16, With(kOfEachHead, true, false)},
        BiasShape{"strided_keys", DType::kBFloat16, kOfEachHead, true, 0.0f, 3},
        BiasShape{"shared_by_batch", DType::kFloat32, {.per_head = true, .gradient = true}, false},
        BiasShape{
            "shared_by_heads", DType::kBFloat16, {.per_batch = true, .gradient = true}, false},
        BiasShape{"softcap_before", DType::kFloat32, kOfEachHead, false, 2.0f},
        BiasShape{"softcap_behind", DType::kFloat32, With(kOfEachHead, false, true), true, 2.0f},
        BiasShape{"wide", DType::kFloat32, kOfEachHead, true, 0.0f, 1, 3e18f}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace ringattn::worker

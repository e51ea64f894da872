#include "worker/kernels/cuda/sm90/launch/bias_gradient.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr DeviceInfo kH200{132, 9, 227 << 10};

AttentionProblem ProblemOf(int64_t dim, BiasForm form) {
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.batch = 2;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = problem.head_dim_v = dim;
  problem.bands = {Band{.upper = 0}};
  problem.terms.shifts = {0};
  problem.terms.columns = 1000;
  problem.terms.bias = form;
  return problem;
}

// 1,000 causal tokens, without addresses: the call only measures sizes.
BiasGradientCall CallOf(const AttentionProblem& problem) {
  BiasGradientCall call;
  call.problem = &problem;
  call.q_rows = 1000;
  call.q_pieces = {Piece{.length = 1000}};
  call.blocks = {{1000, {Piece{.length = 1000}}}};
  return call;
}

TEST(BiasGradientTest, TakesWhatTheCopyEngineReads) {
  const AttentionProblem problem = ProblemOf(128, {});
  BiasGradientCall call = CallOf(problem);
  EXPECT_TRUE(TakesBiasGradient(call, kH200));
  call.dbias = reinterpret_cast<void*>(uintptr_t{2});  // the kernel stores at any alignment
  EXPECT_TRUE(TakesBiasGradient(call, kH200));
  call.dout = reinterpret_cast<const void*>(uintptr_t{8});
  EXPECT_FALSE(TakesBiasGradient(call, kH200));
  call.dout = nullptr;
  call.blocks[0].pieces[0].stride = 2;
  EXPECT_FALSE(TakesBiasGradient(call, kH200));
  call.q_pieces[0].stride = 2;
  EXPECT_TRUE(TakesBiasGradient(call, kH200));
  EXPECT_FALSE(TakesBiasGradient(call, {132, 9, 163 << 10}));
}

// Every plane has separate blocks, for any number of heads and batch rows that are summed into it.
TEST(BiasGradientTest, PreparesTablesAndScratch) {
  for (bool per_head : {false, true}) {
    for (int64_t dim : {64, 128}) {
      AttentionProblem problem = ProblemOf(dim, {.per_batch = per_head, .per_head = per_head});
      const auto plain = PreparedBiasGradient::Create(CallOf(problem), kH200);
      ASSERT_TRUE(plain.ok()) << plain.status();
      EXPECT_TRUE((*plain)->has_work());
      EXPECT_EQ((*plain)->scratch_bytes(), 0);
      std::vector<char> tables((*plain)->table_bytes());
      (*plain)->WriteTables(tables.data());
      problem.terms.mask = MaskForm{};
      const auto masked = PreparedBiasGradient::Create(CallOf(problem), kH200);
      ASSERT_TRUE(masked.ok()) << masked.status();
      EXPECT_EQ((*masked)->scratch_bytes(), 256 + 36 * 2048);  // 36 pairs of 128 by 128
      problem.terms.columns = 1001;                            // needs a copy, in rows of 1,000
      const auto copied = PreparedBiasGradient::Create(CallOf(problem), kH200);
      ASSERT_TRUE(copied.ok()) << copied.status();
      const int64_t planes = per_head ? 8 : 1;
      EXPECT_EQ((*copied)->scratch_bytes(),
                256 + 36 * 2048 + (planes * 1000 * 1000 * 2 + 255) / 256 * 256);
    }
  }
}

}  // namespace
}  // namespace ringattn::worker::cuda::sm90

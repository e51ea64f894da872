// Merging is associative up to rounding: the same blocks of keys in any order, in
// one call or one by one, give the same result.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "common/oracle/generator.h"
#include "common/oracle/numeric.h"
#include "gtest/gtest.h"
#include "tests/cases/covering_array.h"
#include "worker/kernels/cpu/cpu_kernels.h"

namespace ringattn::tests {

using namespace ringattn::worker;  // what is under test
namespace {

constexpr int64_t kRows = 37, kKeys = 150, kBlocks = 5, kHeads = 4, kKvHeads = 2, kDim = 24;

class MergeOrderTest : public testing::TestWithParam<DType> {
 protected:
  MergeOrderTest() : cpu_(/*threads=*/1) {
    problem_.dtype = GetParam();
    problem_.num_heads = kHeads;
    problem_.num_kv_heads = kKvHeads;
    problem_.head_dim = problem_.head_dim_v = kDim;
    problem_.softmax_scale = 0.2f;
    problem_.bands = {Band{-100, kKeys - kRows - 5}};
    q_ = Random(kRows * kHeads * kDim, 1);
    k_ = Random(kKeys * kKvHeads * kDim, 2);
    v_ = Random(kKeys * kKvHeads * kDim, 3);
    q_pieces_ = {Piece{0, kRows, 0, 0, 1}};
  }

  std::vector<uint8_t> Random(int64_t count, uint64_t stream) const {
    std::vector<uint8_t> data(count * oracle::BytesOf(GetParam()));
    oracle::FillNormal(GetParam(), 77, stream, 0, count, 1.0, data.data());
    return data;
  }

  // Block b holds keys b, b + kBlocks, ...: every block matters to every row.
  KvBlock Block(int64_t b) {
    const int64_t rows = kKeys / kBlocks;
    const int64_t row_bytes = kKvHeads * kDim * oracle::BytesOf(GetParam());
    std::vector<uint8_t>& k = block_k_[b];
    std::vector<uint8_t>& v = block_v_[b];
    k.clear();
    v.clear();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = (b + r * kBlocks) * row_bytes;
      k.insert(k.end(), k_.begin() + at, k_.begin() + at + row_bytes);
      v.insert(v.end(), v_.begin() + at, v_.begin() + at + row_bytes);
    }
    KvBlock block;
    block.rows = rows;
    block.pieces = {Piece{0, rows, 0, b, kBlocks}};
    block.k = k.data();
    block.v = v.data();
    return block;
  }

  void Run(const KernelCall& call) {
    const absl::Status status = cpu_.Run(call, stop_, &progress_);
    ASSERT_TRUE(status.ok()) << status;
  }

  // Forward over groups of blocks, one call per group.
  void Forward(const std::vector<std::vector<int64_t>>& groups, std::vector<float>* out,
               std::vector<float>* lse) {
    out->assign(kRows * kHeads * kDim, NAN);
    lse->assign(kRows * kHeads, NAN);
    for (size_t g = 0; g < groups.size(); ++g) {
      ForwardCall call;
      call.problem = &problem_;
      call.q_rows = kRows;
      call.q_pieces = q_pieces_;
      call.q = q_.data();
      for (const int64_t b : groups[g]) call.blocks.push_back(Block(b));
      call.out_acc = out->data();
      call.lse = lse->data();
      call.initial = g == 0;
      Run(call);
    }
  }

  static void ExpectNear(const std::vector<float>& a, const std::vector<float>& b) {
    for (size_t e = 0; e < a.size(); ++e) {
      if (a[e] == b[e]) continue;
      ASSERT_LE(std::abs(a[e] - b[e]), 1e-5f * (1.0f + std::abs(b[e]))) << "element " << e;
    }
  }

  AttentionProblem problem_;
  CpuKernels cpu_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> progress_{0};
  std::vector<uint8_t> q_, k_, v_;
  std::vector<uint8_t> block_k_[kBlocks], block_v_[kBlocks];
  std::vector<Piece> q_pieces_;
};

TEST_P(MergeOrderTest, AnyOrderOfBlocksAgrees) {
  // bf16 kernels may round p relative to each call's own maximum.
  const float tolerance = GetParam() == DType::kFloat32 ? 1e-5f : 2e-2f;
  std::vector<float> out, lse, other_out, other_lse;
  Forward({{0, 1, 2, 3, 4}}, &out, &lse);
  tests::Random random(5, 0);
  std::vector<int64_t> order(kBlocks);
  std::iota(order.begin(), order.end(), 0);
  for (int turn = 0; turn < 20; ++turn) {
    for (int i = kBlocks - 1; i > 0; --i) std::swap(order[i], order[random.Between(0, i)]);
    std::vector<std::vector<int64_t>> groups;
    for (const int64_t b : order) {
      if (groups.empty() || random.Between(0, 2) > 0) groups.emplace_back();
      groups.back().push_back(b);
    }
    Forward(groups, &other_out, &other_lse);
    for (size_t e = 0; e < out.size(); ++e) {
      ASSERT_LE(std::abs(out[e] - other_out[e]), tolerance * (1.0f + std::abs(out[e])));
    }
    ExpectNear(lse, other_lse);
  }
}

TEST_P(MergeOrderTest, ACallWithoutBlocksKeepsThePartial) {
  std::vector<float> out, lse, same_out, same_lse;
  Forward({{0, 2}}, &out, &lse);
  Forward({{0, 2}, {}}, &same_out, &same_lse);
  EXPECT_EQ(out, same_out);
  EXPECT_EQ(lse, same_lse);
  Forward({{}, {0, 2}}, &same_out, &same_lse);
  ExpectNear(out, same_out);
  ExpectNear(lse, same_lse);
}

INSTANTIATE_TEST_SUITE_P(DTypes, MergeOrderTest,
                         testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16));

}  // namespace
}  // namespace ringattn::tests

// Rarely used parts of the kernel contract in the naive kernels.
#include "worker/kernels/naive/naive_kernels.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

// Only pairs outside the band stay untouched. Pairs hidden by a mask or ids, and rows without keys,
// get 0.
TEST(NaiveKernelsTest, BiasGradientIsZeroForPairsHiddenByTerms) {
  constexpr int64_t kBatch = 2, kHeads = 2, kRows = 4, kKeys = 5;
  AttentionProblem problem;
  problem.batch = kBatch;
  problem.num_heads = problem.num_kv_heads = kHeads;
  problem.bands = {Band{.upper = kKeys - kRows}};
  problem.terms.shifts = {kKeys - kRows};
  problem.terms.columns = kKeys;
  problem.terms.bias = BiasForm{.per_head = true, .gradient = true};
  problem.terms.mask = MaskForm{};
  problem.terms.segment_ids = true;
  const std::vector<float> q(kBatch * kRows * kHeads, 0.5f), k(kBatch * kKeys * kHeads, 0.25f);
  const std::vector<float> bias(kHeads * kRows * kKeys, 0.125f);
  std::vector<uint8_t> mask(kRows * kKeys, 1);
  for (int64_t row = 0; row < kRows; ++row) mask[row * kKeys] = 0;
  std::vector<int32_t> q_ids(kBatch * kRows, 7), kv_ids(kBatch * kKeys, 7);
  std::vector<float> lse(kBatch * kHeads * kRows, 1.0f), delta(lse.size(), -1.0f);
  for (int64_t b = 0; b < kBatch; ++b) {
    q_ids[b * kRows + 3] = -1;
    for (int64_t h = 0; h < kHeads; ++h) {
      lse[(b * kHeads + h) * kRows] = -std::numeric_limits<float>::infinity();
    }
  }
  std::vector<float> dbias(kHeads * kRows * kKeys, NAN);
  BiasGradientCall call;
  call.problem = &problem;
  call.q_rows = kRows;
  call.q_pieces = {Piece{.length = kRows}};
  call.q = q.data();
  call.dout = q.data();
  call.lse = lse.data();
  call.delta = delta.data();
  KvBlock& block = call.blocks.emplace_back();
  block.rows = kKeys;
  block.pieces = {Piece{.length = kKeys}};
  block.k = block.v = k.data();
  block.segment_ids = kv_ids.data();
  call.terms = {bias.data(), mask.data(), q_ids.data()};
  call.dbias = dbias.data();
  RunNaively(call);
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t key = 0; key < kKeys; ++key) {
        SCOPED_TRACE(testing::Message() << "head " << h << " row " << row << " key " << key);
        const float found = dbias[(h * kRows + row) * kKeys + key];
        if (key > row + kKeys - kRows) {
          EXPECT_TRUE(std::isnan(found));
        } else if (key == 0 || row == 0 || row == 3) {
          EXPECT_EQ(found, 0.0f);
        } else {
          EXPECT_GT(found, 0.0f);  // sum over two batch rows: dp and -delta are positive
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::worker

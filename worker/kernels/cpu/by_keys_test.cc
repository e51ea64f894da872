// A bias and a mask that are sharded by keys (ScoreTerms::by_keys) give the same bits as the same
// numbers sharded by queries, with the naive kernels and with these.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "gtest/gtest.h"
#include "worker/kernels/cpu/testing/kernel_runner.h"
#include "worker/kernels/naive/naive_kernels.h"

namespace ringattn::worker {
namespace {

struct Cut {
  const char* name;
  std::vector<Piece> queries, keys;
};

int64_t RowsOf(const std::vector<Piece>& pieces) {
  int64_t rows = 0;
  for (const Piece& piece : pieces) rows = std::max(rows, piece.local_begin + piece.length);
  return rows;
}

std::vector<int64_t> PositionsOf(const std::vector<Piece>& pieces) {
  std::vector<int64_t> positions(RowsOf(pieces));
  for (const Piece& piece : pieces) {
    for (int64_t r = 0; r < piece.length; ++r) {
      positions[piece.local_begin + r] = piece.PositionOf(r);
    }
  }
  return positions;
}

struct Shape {
  const char* name;
  DType dtype = DType::kFloat32;
  std::optional<BiasForm> bias;
  std::optional<MaskForm> mask;
  float softcap = 0.0f;
  float magnitude = 1.0f;
};

constexpr int64_t kQueries = 150, kKeys = 500, kBatch = 2, kHeads = 4;

// The results of one call of each kind.
struct Results {
  std::vector<char> out;
  std::vector<float> lse, dq, dk, dv;
  std::vector<char> dbias;
};

// Bits: NaN is NaN.
std::vector<char> BitsOf(const std::vector<float>& values) {
  const char* const first = reinterpret_cast<const char*>(values.data());
  return {first, first + values.size() * sizeof(float)};
}

// Some queries and keys of a causal problem in one call of each kind, with segment ids, ALiBi and
// dropout.
class ByKeysTest : public testing::TestWithParam<std::tuple<Cut, Shape>> {
 protected:
  const Cut& cut() const { return std::get<0>(GetParam()); }
  const Shape& form() const { return std::get<1>(GetParam()); }

  void SetUp() override {
    TestShape shape;
    shape.dtype = form().dtype;
    shape.batch = kBatch;
    shape.heads = kHeads;
    shape.kv_heads = 2;
    shape.head_dim = 40;
    shape.head_dim_v = 24;
    shape.softcap = form().softcap;
    shape.bands = {Band{.lower = -400, .upper = kKeys - kQueries}};
    shape.q_pieces = cut().queries;
    shape.q_rows = RowsOf(cut().queries);
    shape.kv_pieces = {cut().keys};
    shape.kv_rows = {RowsOf(cut().keys)};
    data_.emplace(shape, /*seed=*/7, form().magnitude);
    q_positions_ = PositionsOf(cut().queries);
    k_positions_ = PositionsOf(cut().keys);
    by_queries_ = data_->problem;
    ScoreTerms& terms = by_queries_.terms;
    terms.shifts = {kKeys - kQueries};
    terms.columns = kKeys;
    terms.bias = form().bias;
    terms.mask = form().mask;
    terms.alibi_slopes = {0.25f, 0.0625f, 0.0f, -0.01f};
    terms.segment_ids = true;
    terms.dropout = {.threshold = 6554, .seed = 1};
    by_keys_ = by_queries_;
    by_keys_.terms.by_keys = true;
    by_keys_.terms.rows = kQueries;
    by_keys_.terms.columns = k_rows();

    std::mt19937 random(3);
    if (form().bias.has_value()) {
      TestTensor bias = MakeTensor(BiasType(), BiasPlanes() * q_rows() * kKeys);
      FillRandom(bias, random, 1.0f);
      for (int64_t e = 0; e < bias.count; e += 17) bias.Set(e, -INFINITY);
      bias_ = bias.bytes;
    }
    if (form().mask.has_value()) {
      mask_.resize(MaskPlanes() * q_rows() * kKeys);
      for (char& byte : mask_) byte = random() % 4 != 0;
    }
    for (int64_t i = 0; i < kBatch * q_rows(); ++i) q_ids_.push_back(random() % 8 == 0);
    for (int64_t i = 0; i < kBatch * k_rows(); ++i) kv_ids_.push_back(random() % 8 == 0);
  }

  int64_t q_rows() const { return data_->shape.q_rows; }
  int64_t k_rows() const { return data_->shape.kv_rows[0]; }
  DType BiasType() const { return form().bias->float32 ? DType::kFloat32 : form().dtype; }
  int64_t BiasPlanes() const {
    return (form().bias->per_batch ? kBatch : 1) * (form().bias->per_head ? kHeads : 1);
  }
  int64_t MaskPlanes() const {
    return (form().mask->per_batch ? kBatch : 1) * (form().mask->per_head ? kHeads : 1);
  }

  // use(by queries, by keys): where a pair of the call is in a tensor of so many planes, either
  // way.
  void ForEachPair(int64_t planes, const std::function<void(int64_t, int64_t)>& use) const {
    for (int64_t plane = 0; plane < planes; ++plane) {
      for (int64_t i = 0; i < q_rows(); ++i) {
        for (int64_t j = 0; j < k_rows(); ++j) {
          use((plane * q_rows() + i) * kKeys + k_positions_[j],
              (plane * kQueries + q_positions_[i]) * k_rows() + j);
        }
      }
    }
  }
  // Elements that belong to no pair of the call may hold any value: all their bits are set.
  std::vector<char> CutByKeys(const std::vector<char>& tensor, int64_t planes,
                              int64_t bytes) const {
    std::vector<char> cut(planes * kQueries * k_rows() * bytes, static_cast<char>(0xff));
    ForEachPair(planes, [&](int64_t from, int64_t to) {
      std::memcpy(cut.data() + to * bytes, tensor.data() + from * bytes, bytes);
    });
    return cut;
  }

  using Run = std::function<void(const KernelCall&)>;
  Results RunAll(bool by_keys, const Run& run) {
    const AttentionProblem& problem = by_keys ? by_keys_ : by_queries_;
    std::vector<char> bias = bias_, mask = mask_;
    if (by_keys && form().bias.has_value()) {
      bias = CutByKeys(bias_, BiasPlanes(), ElementBytes(BiasType()));
    }
    if (by_keys && form().mask.has_value()) mask = CutByKeys(mask_, MaskPlanes(), 1);
    Results results;
    results.out.resize(data_->dout.bytes.size());
    results.lse.resize(kBatch * kHeads * q_rows());
    results.dq.resize(data_->q.count);
    results.dk.resize(data_->k[0].count);
    results.dv.resize(data_->v[0].count);
    std::vector<float> delta(results.lse.size());
    for (size_t i = 0; i < delta.size(); ++i) delta[i] = 0.01f * static_cast<float>(i % 100);
    std::vector<KvBlock> blocks = data_->Blocks();
    blocks[0].dk = results.dk.data();
    blocks[0].dv = results.dv.data();
    blocks[0].segment_ids = kv_ids_.data();
    const TermOperands terms = {bias.data(), reinterpret_cast<const uint8_t*>(mask.data()),
                                q_ids_.data()};
    ForwardCall forward;
    forward.problem = &problem;
    forward.q_rows = q_rows();
    forward.q_pieces = cut().queries;
    forward.q = data_->q.data();
    forward.blocks = blocks;
    forward.lse = results.lse.data();
    forward.out = results.out.data();
    forward.terms = terms;
    forward.initial = forward.final = true;
    run(forward);
    BackwardCall backward;
    backward.problem = &problem;
    backward.q_rows = q_rows();
    backward.q_pieces = cut().queries;
    backward.q = data_->q.data();
    backward.dout = data_->dout.data();
    backward.lse = results.lse.data();
    backward.delta = delta.data();
    backward.dq_acc = results.dq.data();
    backward.blocks = blocks;
    backward.terms = terms;
    if (!form().bias.has_value()) {
      run(backward);
      return results;
    }
    results.dbias.assign(bias.size(), static_cast<char>(0xff));
    gradient_ = {&problem,     q_rows(),     cut().queries, data_->q.data(), data_->dout.data(),
                 backward.lse, delta.data(), blocks,        terms,           results.dbias.data()};
    run(backward);
    run(gradient_);
    return results;
  }

  void ExpectSame(const Results& by_keys, const Results& by_queries) const {
    EXPECT_TRUE(by_keys.out == by_queries.out);
    EXPECT_TRUE(BitsOf(by_keys.lse) == BitsOf(by_queries.lse));
    EXPECT_TRUE(BitsOf(by_keys.dq) == BitsOf(by_queries.dq));
    EXPECT_TRUE(BitsOf(by_keys.dk) == BitsOf(by_queries.dk));
    EXPECT_TRUE(BitsOf(by_keys.dv) == BitsOf(by_queries.dv));
    if (!form().bias.has_value()) return;
    // Elements that belong to no pair of the call are unchanged.
    EXPECT_TRUE(by_keys.dbias ==
                CutByKeys(by_queries.dbias, BiasPlanes(), ElementBytes(BiasType())));
  }

  std::optional<TestData> data_;
  AttentionProblem by_queries_, by_keys_;
  std::vector<int64_t> q_positions_, k_positions_;
  std::vector<char> bias_, mask_;  // by queries
  std::vector<int32_t> q_ids_, kv_ids_;
  BiasGradientCall gradient_;
};

TEST_P(ByKeysTest, TheNaiveKernelsHaveTheSame) {
  const Run run = [](const KernelCall& call) { RunNaively(call); };
  ExpectSame(RunAll(/*by_keys=*/true, run), RunAll(/*by_keys=*/false, run));
}

TEST_P(ByKeysTest, TheKernelsHaveTheSame) {
  CpuKernels kernels(/*threads=*/2);
  const Run run = [&](const KernelCall& call) { RunOrDie(kernels, call); };
  ExpectSame(RunAll(/*by_keys=*/true, run), RunAll(/*by_keys=*/false, run));
}

TEST_P(ByKeysTest, TheGradientsAtOnceAreThoseApart) {
  if (!form().bias.has_value()) return;
  CpuKernels kernels(/*threads=*/2);
  const Results apart =
      RunAll(/*by_keys=*/true, [&](const KernelCall& call) { RunOrDie(kernels, call); });
  const Run at_once = [&](const KernelCall& call) {
    if (std::holds_alternative<BiasGradientCall>(call)) return;
    const auto* const backward = std::get_if<BackwardCall>(&call);
    if (backward == nullptr) return RunOrDie(kernels, call);
    const std::atomic<bool> stop{false};
    std::atomic<int64_t> tiles{0}, work{0};
    EXPECT_TRUE(kernels.RunGradients(*backward, gradient_, stop, &tiles, &work).ok());
  };
  const Results together = RunAll(/*by_keys=*/true, at_once);
  EXPECT_TRUE(BitsOf(together.dq) == BitsOf(apart.dq));
  EXPECT_TRUE(together.dbias == apart.dbias);
}

const Cut kCuts[] = {
    {"all", {{.length = kQueries}}, {{.length = kKeys}}},
    {"zigzag",
     {{.length = 40, .position = 30}, {.local_begin = 40, .length = 33, .position = 101}},
     {{.length = 120, .position = 80}, {.local_begin = 120, .length = 77, .position = 400}}},
    {"zigzag_the_other_way_round",
     {{.length = 40, .position = 101}, {.local_begin = 40, .length = 33, .position = 30}},
     {{.length = 90, .position = 400}, {.local_begin = 90, .length = 120, .position = 10}}},
    {"striped",
     {{.length = 50, .position = 1, .stride = 3}},
     {{.length = 166, .position = 2, .stride = 3}}},
    {"two_strides",
     {{.length = 20, .position = 100, .stride = 2}, {.local_begin = 20, .length = 60}},
     {{.length = 200}, {.local_begin = 200, .length = 60, .position = 205, .stride = 4}}},
};

const Shape kShapes[] = {
    {"fp32", DType::kFloat32, BiasForm{.per_head = true, .gradient = true}, MaskForm{}},
    {"bf16", DType::kBFloat16, BiasForm{.per_batch = true, .per_head = true, .gradient = true},
     MaskForm{.per_batch = true}},
    {"fp16_bias_of_fp32", DType::kFloat16, BiasForm{.float32 = true, .gradient = true}, {}},
    {"before_softcap", DType::kFloat32,
     BiasForm{.per_batch = true, .per_head = true, .before_softcap = true, .gradient = true},
     MaskForm{.per_batch = true, .per_head = true}, 2.0f},
    {"mask_alone", DType::kBFloat16, {}, MaskForm{.per_head = true}},
    {"wide", DType::kFloat32, BiasForm{.per_batch = true, .per_head = true, .gradient = true},
     MaskForm{}, 0.0f, 3e18f},
};

INSTANTIATE_TEST_SUITE_P(All, ByKeysTest,
                         testing::Combine(testing::ValuesIn(kCuts), testing::ValuesIn(kShapes)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace ringattn::worker

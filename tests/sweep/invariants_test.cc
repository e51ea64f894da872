// Properties for all inputs: identities between runs of the system itself, which an error shared by
// oracle and kernels could not satisfy by accident.
#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "tests/sweep/solve.h"

namespace ringattn::tests {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

AttentionSpec DenseSpec(int64_t batch, int64_t sq, int64_t sk, int64_t heads, int64_t kv_heads,
                        int64_t dim, int64_t dim_v) {
  AttentionSpec spec;
  spec.shape = {.batch = batch,
                .seq_len_q = sq,
                .seq_len_kv = sk,
                .num_heads = heads,
                .num_kv_heads = kv_heads,
                .head_dim = dim,
                .head_dim_v = dim_v,
                .cu_seqlens_q = {0, sq},
                .cu_seqlens_k = {0, sk}};
  spec.options.softmax_scale = 1.0 / std::sqrt(static_cast<double>(dim));
  return spec;
}

// Forward and gradients of one problem as floats (fp32 problems only).
struct Solution {
  std::vector<float> out, lse, dq, dk, dv;
};

Solution Solve(const AttentionSpec& spec, const TensorMap& inputs, const Placement& placement = {},
               KernelSet kernels = KernelSet::kCpu) {
  Solution solution;
  const auto forward =
      RunProblem(spec, placement, Direction::kForward, false, inputs, Engine::kExecutor, kernels);
  const auto backward =
      RunProblem(spec, placement, Direction::kBackward, true, inputs, Engine::kExecutor, kernels);
  EXPECT_TRUE(forward.ok()) << forward.status();
  EXPECT_TRUE(backward.ok()) << backward.status();
  if (!forward.ok() || !backward.ok()) return solution;
  solution.out = Floats(forward->at(TensorId::kOut));
  solution.lse = Floats(forward->at(TensorId::kLse));
  solution.dq = Floats(backward->at(TensorId::kDq));
  solution.dk = Floats(backward->at(TensorId::kDk));
  solution.dv = Floats(backward->at(TensorId::kDv));
  return solution;
}

void ExpectNear(const std::vector<float>& a, const std::vector<float>& b, const char* name,
                float tolerance = 1e-5f) {
  ASSERT_EQ(a.size(), b.size()) << name;
  for (size_t e = 0; e < a.size(); ++e) {
    if (a[e] == b[e]) continue;  // equal infinities too
    ASSERT_LE(std::abs(a[e] - b[e]), tolerance * (1.0f + std::abs(b[e])))
        << name << " element " << e << ": " << a[e] << " and " << b[e];
  }
}

void ExpectNear(const Solution& a, const Solution& b) {
  ExpectNear(a.out, b.out, "out");
  ExpectNear(a.lse, b.lse, "lse");
  ExpectNear(a.dq, b.dq, "dq");
  ExpectNear(a.dk, b.dk, "dk");
  ExpectNear(a.dv, b.dv, "dv");
}

void ExpectSameBits(const Solution& a, const Solution& b) {
  EXPECT_EQ(Bytes(a.out), Bytes(b.out));
  EXPECT_EQ(Bytes(a.lse), Bytes(b.lse));
  EXPECT_EQ(Bytes(a.dq), Bytes(b.dq));
  EXPECT_EQ(Bytes(a.dk), Bytes(b.dk));
  EXPECT_EQ(Bytes(a.dv), Bytes(b.dv));
}

// One sample of every option at once, and some alone.
std::vector<AttentionSpec> Specs() {
  std::vector<AttentionSpec> specs;
  specs.push_back(DenseSpec(1, 150, 150, 2, 2, 32, 32));
  specs.push_back(DenseSpec(2, 97, 133, 4, 2, 24, 40));
  specs.back().options.causal = true;
  specs.push_back(DenseSpec(1, 140, 61, 3, 1, 64, 16));
  specs.back().options.causal = true;
  specs.back().options.softcap = 5.0;
  specs.push_back(DenseSpec(1, 130, 130, 2, 1, 17, 17));
  specs.back().options.window_left = 20;
  specs.back().options.window_right = 9;
  specs.push_back(DenseSpec(1, 120, 131, 2, 2, 16, 16));
  specs.back().shape.packed = true;
  specs.back().shape.cu_seqlens_q = {0, 40, 40, 71, 120};
  specs.back().shape.cu_seqlens_k = {0, 51, 60, 60, 131};
  specs.back().options.window_left = 30;
  return specs;
}

TEST(Invariants, AnyPlacementEqualsOneRank) {
  for (const AttentionSpec& spec : Specs()) {
    const TensorMap inputs = NormalInputs(spec, 1);
    const Solution alone = Solve(spec, inputs);
    for (const Layout layout :
         {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kZigzagPerDocument}) {
      for (const int world_size : {2, 3, 4, 8}) {
        SCOPED_TRACE(std::string(LayoutName(layout)) + " over " + std::to_string(world_size));
        ExpectNear(Solve(spec, inputs, {layout, world_size, 1}), alone);
        for (const ScheduleKind kind :
             {ScheduleKind::kAllGather, ScheduleKind::kPassQ, ScheduleKind::kReplicatedQ}) {
          SCOPED_TRACE(ScheduleKindName(kind));
          ExpectNear(Solve(spec, inputs, {layout, world_size, 1, kind}), alone);
        }
        ExpectNear(Solve(spec, inputs, {layout, world_size, 1, ScheduleKind::kAllGather, 1}),
                   alone);
      }
    }
    ExpectNear(Solve(spec, inputs, {Layout::kStriped, 3, 16}), alone);
  }
}

TEST(Invariants, TheSameRunGivesTheSameBits) {
  for (const AttentionSpec& spec : Specs()) {
    const TensorMap inputs = NormalInputs(spec, 2);
    const Placement placement = {Layout::kZigzag, 4, 1};
    ExpectSameBits(Solve(spec, inputs, placement), Solve(spec, inputs, placement));
  }
}

TEST(Invariants, EveryScheduleGivesTheSameBitsAgain) {
  for (const AttentionSpec& spec : Specs()) {
    const TensorMap inputs = NormalInputs(spec, 2);
    for (const Placement& placement : {Placement{Layout::kZigzag, 4, 1, ScheduleKind::kAllGather},
                                       {Layout::kZigzag, 4, 1, ScheduleKind::kAllGather, 1},
                                       {Layout::kZigzag, 4, 1, ScheduleKind::kPassQ},
                                       {Layout::kZigzag, 4, 1, ScheduleKind::kReplicatedQ}}) {
      ExpectSameBits(Solve(spec, inputs, placement), Solve(spec, inputs, placement));
    }
  }
}

// A group of heads is a separate problem: rows are summed in the same order.
TEST(Invariants, HeadsOfAGroupAreThoseOfAllHeads) {
  for (const AttentionSpec& spec : Specs()) {
    const TensorMap inputs = NormalInputs(spec, 15);
    Placement placement = {Layout::kZigzag, 4, 1, ScheduleKind::kAllGather};
    const Solution all = Solve(spec, inputs, placement);
    placement.heads_per_step = 1;
    const Solution one = Solve(spec, inputs, placement);
    ExpectSameBits(one, all);
  }
}

// One call over all that a row sees has one device's roundings, not those of merges.
TEST(Invariants, AllGatherIsAsExactAsOneDevice) {
  for (const AttentionSpec& spec : Specs()) {
    const oracle::InputTensors drawn =
        oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 17, true);
    const oracle::Result exact = oracle::EvaluateAll(spec, drawn.view());
    const auto error = [&](const Placement& placement) {
      const Solution solution = Solve(spec, ToTensorMap(drawn), placement);
      double sum = 0.0;
      for (size_t e = 0; e < solution.out.size(); ++e) {
        sum += std::pow(double{solution.out[e]} - exact.out.exact[e], 2);
      }
      return std::sqrt(sum);
    };
    const double one = error({Layout::kContiguous, 1, 1, ScheduleKind::kSingle});
    for (const int world_size : {2, 4, 8}) {
      const double gathered = error({Layout::kZigzag, world_size, 1, ScheduleKind::kAllGather});
      EXPECT_LE(gathered, 1.05 * one) << "over " << world_size;
    }
  }
}

TEST(Invariants, CausalIsAWindowThatEndsAtTheRow) {
  AttentionSpec causal = DenseSpec(1, 100, 130, 2, 1, 32, 32);
  AttentionSpec window = causal;
  causal.options.causal = true;
  window.options.window_right = 0;
  const TensorMap inputs = NormalInputs(causal, 3);
  for (const int world_size : {1, 3}) {
    const Placement placement = {Layout::kZigzag, world_size, 1};
    ExpectSameBits(Solve(causal, inputs, placement), Solve(window, inputs, placement));
  }
}

TEST(Invariants, AWindowBeyondTheEndIsNoWindow) {
  const AttentionSpec plain = DenseSpec(1, 90, 70, 2, 2, 32, 32);
  AttentionSpec window = plain;
  window.options.window_left = window.options.window_right = 1000;
  const TensorMap inputs = NormalInputs(plain, 4);
  ExpectSameBits(Solve(plain, inputs, {Layout::kContiguous, 2, 1}),
                 Solve(window, inputs, {Layout::kContiguous, 2, 1}));
}

// Both sides 0 is the aligned position alone, not "no window".
TEST(Invariants, AWindowOfNothingIsTheAlignedKey) {
  AttentionSpec spec = DenseSpec(2, 61, 90, 4, 2, 16, 8);
  spec.options.window_left = spec.options.window_right = 0;
  const TensorMap inputs = NormalInputs(spec, 16);
  const std::vector<float> v = Floats(inputs.at(TensorId::kV));
  for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    for (const int world_size : {1, 3}) {
      const Solution solution = Solve(spec, inputs, {layout, world_size, 1});
      for (int64_t row = 0; row < 2 * 61 * 4; ++row) {
        const int64_t b = row / 244, i = row / 4 % 61, h = row % 4;
        for (int64_t d = 0; d < 8; ++d) {
          const float value = v[((b * 90 + i + 29) * 2 + h / 2) * 8 + d];
          ASSERT_NEAR(solution.out[row * 8 + d], value, 1e-6f * std::abs(value));
        }
      }
      // One key has all the weight: no score has a gradient.
      ExpectNear(solution.dq, std::vector<float>(solution.dq.size(), 0.0f), "dq");
    }
  }
}

TEST(Invariants, OneDocumentIsADenseProblem) {
  AttentionSpec dense = DenseSpec(1, 77, 77, 2, 1, 32, 48);
  dense.options.causal = true;
  AttentionSpec packed = dense;
  packed.shape.packed = true;
  const TensorMap inputs = NormalInputs(dense, 5);
  for (const int world_size : {1, 4}) {
    ExpectSameBits(Solve(dense, inputs, {Layout::kStriped, world_size, 1}),
                   Solve(packed, inputs, {Layout::kStriped, world_size, 1}));
  }
}

TEST(Invariants, EqualDocumentsAreABatch) {
  AttentionSpec batch = DenseSpec(3, 40, 50, 2, 2, 16, 16);
  batch.options.causal = true;
  AttentionSpec packed = batch;
  packed.shape.packed = true;
  packed.shape.batch = 1;
  packed.shape.seq_len_q = 120;
  packed.shape.seq_len_kv = 150;
  packed.shape.cu_seqlens_q = {0, 40, 80, 120};
  packed.shape.cu_seqlens_k = {0, 50, 100, 150};
  // The bytes of q, k, v, dout are the same; lse is [3, 2, 40] and [2, 120].
  const TensorMap inputs = NormalInputs(batch, 6);
  Solution dense = Solve(batch, inputs, {Layout::kZigzag, 2, 1});
  std::vector<float> lse(240);
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 40; ++i) {
        lse[h * 120 + b * 40 + i] = dense.lse[(b * 2 + h) * 40 + i];
      }
    }
  }
  dense.lse = lse;
  ExpectNear(Solve(packed, inputs, {Layout::kZigzag, 2, 1}), dense);
}

// The last rows of a square causal problem, asked alone.
TEST(Invariants, FewQueriesAreTheLastRows) {
  AttentionSpec square = DenseSpec(1, 96, 96, 2, 1, 32, 32);
  square.options.causal = true;
  square.options.window_left = 50;
  AttentionSpec tail = square;
  tail.shape.seq_len_q = 13;
  tail.shape.cu_seqlens_q = {0, 13};
  const TensorMap inputs = NormalInputs(square, 7);
  TensorMap tail_inputs = inputs;
  for (const TensorId id : {TensorId::kQ, TensorId::kDout}) {
    const std::vector<uint8_t>& whole = inputs.at(id);
    tail_inputs[id].assign(whole.end() - static_cast<int64_t>(whole.size()) / 96 * 13, whole.end());
  }
  const Solution all = Solve(square, inputs, {Layout::kContiguous, 3, 1});
  const Solution last = Solve(tail, tail_inputs, {Layout::kContiguous, 3, 1});
  ExpectNear(last.out, {all.out.end() - 13 * 64, all.out.end()}, "out");
  ExpectNear(last.dq, {all.dq.end() - 13 * 64, all.dq.end()}, "dq");
}

// Grouped heads are the same as keys and values repeated for each of them.
TEST(Invariants, GroupedHeadsAreRepeatedKeys) {
  const AttentionSpec grouped = DenseSpec(1, 50, 60, 6, 2, 16, 16);
  AttentionSpec repeated = grouped;
  repeated.shape.num_kv_heads = 6;
  const TensorMap inputs = NormalInputs(grouped, 8);
  TensorMap repeated_inputs = inputs;
  for (const TensorId id : {TensorId::kK, TensorId::kV}) {
    const std::vector<float> source = Floats(inputs.at(id));
    std::vector<float> target;
    for (int64_t row = 0; row < 60; ++row) {
      for (int64_t h = 0; h < 6; ++h) {
        const auto head = source.begin() + (row * 2 + h / 3) * 16;
        target.insert(target.end(), head, head + 16);
      }
    }
    repeated_inputs[id] = Bytes(target);
  }
  const Solution a = Solve(grouped, inputs, {Layout::kContiguous, 2, 1});
  const Solution b = Solve(repeated, repeated_inputs, {Layout::kContiguous, 2, 1});
  ExpectNear(a.out, b.out, "out");
  ExpectNear(a.dq, b.dq, "dq");
  for (const auto& [one, many, name] : {std::tuple{&a.dk, &b.dk, "dk"}, {&a.dv, &b.dv, "dv"}}) {
    std::vector<float> sum(one->size(), 0.0f);
    for (size_t e = 0; e < many->size(); ++e) {
      const size_t row = e / 96, h = e % 96 / 16, d = e % 16;
      sum[(row * 2 + h / 3) * 16 + d] += (*many)[e];
    }
    ExpectNear(*one, sum, name);
  }
}

// --- Identities of the gradients ----------------------------------------------

double Dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (size_t e = 0; e < a.size(); ++e) sum += static_cast<double>(a[e]) * b[e];
  return sum;
}

TEST(Invariants, RowsOfPSumToOne) {
  // So the sum of dv over keys is the sum of dout over the rows that see a key.
  AttentionSpec spec = DenseSpec(1, 70, 50, 2, 2, 16, 8);
  spec.options.causal = true;  // the first 20 rows see nothing
  const TensorMap inputs = NormalInputs(spec, 9);
  const Solution solution = Solve(spec, inputs, {Layout::kZigzag, 3, 1});
  const std::vector<float> dout = Floats(inputs.at(TensorId::kDout));
  for (int64_t column = 0; column < 16; ++column) {
    double of_dv = 0.0, of_dout = 0.0;
    for (int64_t j = 0; j < 50; ++j) of_dv += solution.dv[j * 16 + column];
    for (int64_t i = 20; i < 70; ++i) of_dout += dout[i * 16 + column];
    EXPECT_NEAR(of_dv, of_dout, 1e-4);
  }
}

TEST(Invariants, OutIsLinearInVAndScoresAreBilinear) {
  // <dv, v> = <dout, out>; <dq, q> = <dk, k>, both being the sum of ds times q.k.
  for (const AttentionSpec& spec : Specs()) {
    const TensorMap inputs = NormalInputs(spec, 10);
    const Solution solution = Solve(spec, inputs, {Layout::kStriped, 4, 1});
    const std::vector<float> q = Floats(inputs.at(TensorId::kQ));
    const std::vector<float> k = Floats(inputs.at(TensorId::kK));
    const std::vector<float> v = Floats(inputs.at(TensorId::kV));
    const std::vector<float> dout = Floats(inputs.at(TensorId::kDout));
    EXPECT_NEAR(Dot(solution.dv, v), Dot(dout, solution.out), 1e-3);
    EXPECT_NEAR(Dot(solution.dq, q), Dot(solution.dk, k), 1e-3);
  }
}

TEST(Invariants, EqualKeysHaveNoGradientInQ) {
  // All keys alike: p is uniform over what a row sees and ds sums to 0.
  AttentionSpec spec = DenseSpec(1, 40, 40, 1, 1, 8, 8);
  spec.options.causal = true;
  TensorMap inputs = NormalInputs(spec, 11);
  std::vector<float> k = Floats(inputs.at(TensorId::kK));
  for (size_t e = 8; e < k.size(); ++e) k[e] = k[e % 8];
  inputs[TensorId::kK] = Bytes(k);
  const Solution solution = Solve(spec, inputs, {Layout::kZigzag, 2, 1});
  ExpectNear(solution.dq, std::vector<float>(solution.dq.size(), 0.0f), "dq");
}

TEST(Invariants, PowersOfTwoScaleExactly) {
  const AttentionSpec spec = DenseSpec(1, 60, 60, 2, 2, 32, 32);
  const TensorMap inputs = NormalInputs(spec, 12);
  TensorMap doubled = inputs;
  std::vector<float> v = Floats(inputs.at(TensorId::kV));
  for (float& value : v) value *= 2.0f;
  doubled[TensorId::kV] = Bytes(v);
  const Placement placement = {Layout::kContiguous, 2, 1};
  Solution once = Solve(spec, inputs, placement);
  const Solution twice = Solve(spec, doubled, placement);
  for (float& value : once.out) value *= 2.0f;
  EXPECT_EQ(Bytes(once.out), Bytes(twice.out));
  EXPECT_EQ(Bytes(once.lse), Bytes(twice.lse));
}

// --- Rows without keys, empty tensors -------------------------------------------

TEST(Invariants, EmptyTensorsAreLegal) {
  for (const auto& [sq, sk] : {std::pair{0, 5}, {5, 0}, {0, 0}}) {
    for (const int world_size : {1, 4}) {
      const AttentionSpec spec = DenseSpec(2, sq, sk, 2, 1, 8, 8);
      const Solution solution =
          Solve(spec, NormalInputs(spec, 13), {Layout::kZigzag, world_size, 1});
      EXPECT_EQ(solution.out, std::vector<float>(2 * sq * 2 * 8, 0.0f));
      EXPECT_EQ(solution.lse, std::vector<float>(2 * 2 * sq, -kInfinity));
      EXPECT_EQ(solution.dq, std::vector<float>(2 * sq * 2 * 8, 0.0f));
      EXPECT_EQ(solution.dk, std::vector<float>(2 * sk * 1 * 8, 0.0f));
      EXPECT_EQ(solution.dv, std::vector<float>(2 * sk * 1 * 8, 0.0f));
    }
  }
}

TEST(Invariants, UnseenKeysGetNoGradient) {
  // Causal with more keys than the window reaches: no query sees the oldest.
  AttentionSpec spec = DenseSpec(1, 10, 60, 1, 1, 8, 8);
  spec.options.causal = true;
  spec.options.window_left = 5;
  const Solution solution = Solve(spec, NormalInputs(spec, 14), {Layout::kContiguous, 3, 1});
  for (int64_t j = 0; j < 60; ++j) {
    bool zero = true;
    for (int64_t d = 0; d < 8; ++d) {
      zero &= solution.dk[j * 8 + d] == 0.0f && solution.dv[j * 8 + d] == 0.0f;
    }
    EXPECT_EQ(zero, j < 45) << j;
  }
}

}  // namespace
}  // namespace ringattn::tests

// Properties of score terms for all inputs: identities between runs of the system itself.
// keep_set_test covers which pairs dropout keeps.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "gtest/gtest.h"
#include "tests/sweep/solve.h"

namespace ringattn::tests {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

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

Placement Ring(int world_size, Layout layout = Layout::kContiguous, int64_t stripe = 1) {
  return {layout, world_size, stripe,
          world_size == 1 ? ScheduleKind::kSingle : ScheduleKind::kRing};
}

TensorMap Solve(const AttentionSpec& spec, const TensorMap& inputs,
                const Placement& placement = Ring(1)) {
  return SolveBoth(spec, inputs, placement);
}

void ExpectNear(const TensorMap& a, const TensorMap& b, float tolerance = 1e-5f) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [id, bytes] : a) {
    const std::vector<float> x = Floats(bytes), y = Floats(b.at(id));
    ASSERT_EQ(x.size(), y.size()) << TensorName(id);
    for (size_t e = 0; e < x.size(); ++e) {
      if (x[e] == y[e]) continue;
      ASSERT_LE(std::abs(x[e] - y[e]), tolerance * (1.0f + std::abs(y[e])))
          << TensorName(id) << " element " << e;
    }
  }
}

// A mask that hides what `hides` says, of [rows][columns].
template <typename Hides>
std::vector<uint8_t> MaskOf(int64_t rows, int64_t columns, const Hides& hides) {
  std::vector<uint8_t> mask(rows * columns);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) mask[i * columns + j] = hides(i, j) ? 0 : 1;
  }
  return mask;
}

bool HidesSome(int64_t i, int64_t j) {
  return oracle::RandomBits(5, static_cast<uint64_t>(i), static_cast<uint64_t>(j)) % 3 == 0 ||
         i % 7 == 3;
}

TEST(ScoreTerms, AMaskThatHidesNothingIsNone) {
  AttentionSpec spec = DenseSpec(2, 70, 90, 4, 2, 16, 24);
  TensorMap inputs = NormalInputs(spec, 1);
  const TensorMap without = Solve(spec, inputs, Ring(3));
  spec.options.mask = MaskForm{};
  inputs[TensorId::kMask] = MaskOf(70, 90, [](int64_t, int64_t) { return false; });
  ExpectNear(Solve(spec, inputs, Ring(3)), without);
}

TEST(ScoreTerms, BytesAndBitsAreTheSameMask) {
  AttentionSpec spec = DenseSpec(1, 70, 91, 4, 2, 16, 24);
  TensorMap inputs = NormalInputs(spec, 2);
  const std::vector<uint8_t> bytes = MaskOf(70, 91, HidesSome);
  std::vector<uint8_t> bits(70 * 12);
  for (int64_t i = 0; i < 70; ++i) {
    for (int64_t j = 0; j < 91; ++j) bits[i * 12 + j / 8] |= bytes[i * 91 + j] << (j % 8);
  }
  for (const Placement& placement :
       {Ring(1), Ring(3, Layout::kZigzag), Ring(4, Layout::kStriped)}) {
    spec.options.mask = MaskForm{};
    inputs[TensorId::kMask] = bytes;
    const TensorMap by_bytes = Solve(spec, inputs, placement);
    spec.options.mask->bits = true;
    inputs[TensorId::kMask] = bits;
    EXPECT_EQ(Solve(spec, inputs, placement), by_bytes);
  }
}

TEST(ScoreTerms, ABiasOfMinusInfinityIsAMask) {
  AttentionSpec spec = DenseSpec(1, 70, 91, 4, 2, 16, 24);
  TensorMap inputs = NormalInputs(spec, 3);
  const std::vector<uint8_t> mask = MaskOf(70, 91, HidesSome);
  std::vector<float> bias(mask.size());
  for (size_t e = 0; e < mask.size(); ++e) bias[e] = mask[e] != 0 ? 0.0f : kMinusInfinity;
  spec.options.mask = MaskForm{};
  inputs[TensorId::kMask] = mask;
  const TensorMap by_mask = Solve(spec, inputs, Ring(2));
  spec.options.mask.reset();
  spec.options.bias = BiasForm{};
  inputs[TensorId::kBias] = Bytes(bias);
  EXPECT_EQ(Solve(spec, inputs, Ring(2)), by_mask);
}

TEST(ScoreTerms, CausalityAndWindowsAreMasks) {
  AttentionSpec spec = DenseSpec(1, 70, 91, 4, 2, 16, 24);
  TensorMap inputs = NormalInputs(spec, 4);
  AttentionSpec masked = spec;
  masked.options.mask = MaskForm{};
  spec.options.causal = true;
  spec.options.window_left = 30;
  const TensorMap by_band = Solve(spec, inputs, Ring(3));
  inputs[TensorId::kMask] =
      MaskOf(70, 91, [](int64_t i, int64_t j) { return j > i + 21 || j < i + 21 - 30; });
  ExpectNear(Solve(masked, inputs, Ring(3)), by_band);
}

TEST(ScoreTerms, AlibiIsABias) {
  AttentionSpec spec = DenseSpec(2, 70, 91, 4, 2, 16, 24);
  TensorMap inputs = NormalInputs(spec, 5);
  const std::vector<float> slopes = {0.5f, 0.25f, 0.0f, 1.0f, 0.125f, 0.75f, 2.0f, 0.0625f};
  std::vector<float> bias;
  for (int64_t bh = 0; bh < 8; ++bh) {
    for (int64_t i = 0; i < 70; ++i) {
      for (int64_t j = 0; j < 91; ++j) {
        bias.push_back(-slopes[bh] * static_cast<float>(std::abs(i + 21 - j)));
      }
    }
  }
  spec.options.alibi_slopes = slopes;
  for (const Placement& placement :
       {Ring(1), Ring(3, Layout::kZigzag), Ring(4, Layout::kStriped)}) {
    const TensorMap by_slopes = Solve(spec, inputs, placement);
    AttentionSpec biased = spec;
    biased.options.alibi_slopes.clear();
    biased.options.bias = BiasForm{.per_batch = true, .per_head = true};
    inputs[TensorId::kBias] = Bytes(bias);
    ExpectNear(Solve(biased, inputs, placement), by_slopes);
  }
}

// A million keys away the term is still exact: the softmax is over few keys, and lse as the
// nearest ones say. Slopes of 1/2 to 1/256, one per head.
TEST(ScoreTerms, AlibiIsExactFarAway) {
  AttentionSpec spec = DenseSpec(1, 3, 1 << 20, 8, 1, 1, 1);
  for (int h = 0; h < 8; ++h) spec.options.alibi_slopes.push_back(std::ldexp(1.0f, -1 - h));
  std::vector<float> q(3 * 8, 0.0f), k(1 << 20, 1.0f), v(1 << 20);
  for (int64_t j = 0; j < 1 << 20; ++j) v[j] = static_cast<float>((1 << 20) - 1 - j);
  const TensorMap inputs = {
      {TensorId::kQ, Bytes(q)}, {TensorId::kK, Bytes(k)}, {TensorId::kV, Bytes(v)}};
  const auto outputs = RunProblem(spec, Ring(4, Layout::kZigzag), Direction::kForward, false,
                                  inputs, Engine::kExecutor, KernelSet::kCpu);
  ASSERT_TRUE(outputs.ok()) << outputs.status();
  const std::vector<float> out = Floats(outputs->at(TensorId::kOut));
  const std::vector<float> lse = Floats(outputs->at(TensorId::kLse));
  for (int h = 0; h < 8; ++h) {
    SCOPED_TRACE(spec.options.alibi_slopes[h]);
    const double r = std::exp(-spec.options.alibi_slopes[h]);
    // The last query: distances 0, 1, 2, ...
    EXPECT_NEAR(lse[3 * h + 2], -std::log(1 - r), 1e-6 * (1 - std::log(1 - r)));
    EXPECT_NEAR(out[2 * 8 + h], r / (1 - r), 1e-5 * (1 + r / (1 - r)));
    // The first: two keys more on its right.
    const double first = std::log(1 / (1 - r) + r + r * r);
    EXPECT_NEAR(lse[3 * h], first, 1e-6 * (1 + first));
  }
}

TEST(ScoreTerms, SlopesOfZeroAreNone) {
  AttentionSpec spec = DenseSpec(2, 70, 91, 4, 2, 16, 24);
  const TensorMap inputs = NormalInputs(spec, 12);
  const TensorMap without = Solve(spec, inputs, Ring(3));
  for (const int slopes : {4, 8}) {  // of heads, of batch rows and heads
    spec.options.alibi_slopes.assign(slopes, 0.0f);
    ExpectNear(Solve(spec, inputs, Ring(3)), without);
  }
}

TEST(ScoreTerms, SortedSegmentIdsArePackedDocuments) {
  AttentionSpec packed = DenseSpec(1, 90, 90, 4, 2, 16, 24);
  packed.shape.packed = true;
  packed.shape.cu_seqlens_q = packed.shape.cu_seqlens_k = {0, 17, 17, 60, 90};
  TensorMap inputs = NormalInputs(packed, 6);
  const TensorMap by_documents = Solve(packed, inputs, Ring(3));
  AttentionSpec spec = DenseSpec(1, 90, 90, 4, 2, 16, 24);
  spec.options.segment_ids = true;
  std::vector<int32_t> ids;
  for (int t = 0; t < 90; ++t) ids.push_back(t < 17 ? 4 : t < 60 ? 9 : 2);
  inputs[TensorId::kQSegmentIds] = inputs[TensorId::kKvSegmentIds] = Bytes(ids);
  for (const int world_size : {1, 2, 3, 8}) {
    ExpectNear(Solve(spec, inputs, Ring(world_size)), by_documents);
  }
}

// [outer, tokens, ...] with the tokens in another order.
std::vector<uint8_t> Reordered(const std::vector<uint8_t>& bytes, int64_t outer,
                               const std::vector<int64_t>& order) {
  const int64_t row = static_cast<int64_t>(bytes.size() / (outer * order.size()));
  std::vector<uint8_t> reordered;
  for (int64_t o = 0; o < outer; ++o) {
    for (const int64_t token : order) {
      const auto from = bytes.begin() + (o * static_cast<int64_t>(order.size()) + token) * row;
      reordered.insert(reordered.end(), from, from + row);
    }
  }
  return reordered;
}

// Where ids are alone, the order of tokens says nothing: queries and keys in any order, each of its
// own, have their rows and gradients in that order.
TEST(ScoreTerms, ShuffledSegmentIdsAreSortedOnesInAnotherOrder) {
  AttentionSpec spec = DenseSpec(1, 70, 90, 4, 2, 16, 24);
  spec.options.segment_ids = true;
  spec.has_dlse = true;
  const auto draw = [](uint64_t stream, int64_t tokens) {
    std::vector<int32_t> ids;  // -1 to 3
    for (int64_t t = 0; t < tokens; ++t) {
      ids.push_back(static_cast<int32_t>(oracle::RandomBits(6, stream, t) % 5) - 1);
    }
    return ids;
  };
  const auto sorting = [](const std::vector<int32_t>& ids) {
    std::vector<int64_t> order(ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
    return order;
  };
  const std::vector<int32_t> q_ids = draw(1, 70), kv_ids = draw(2, 90);
  const std::vector<int64_t> q_order = sorting(q_ids), kv_order = sorting(kv_ids);
  TensorMap shuffled = NormalInputs(spec, 22);
  shuffled[TensorId::kQSegmentIds] = Bytes(q_ids);
  shuffled[TensorId::kKvSegmentIds] = Bytes(kv_ids);
  const auto sort = [&](TensorMap tensors) {
    for (auto& [id, bytes] : tensors) {
      if (bytes.empty()) continue;
      const bool of_keys = id == TensorId::kK || id == TensorId::kV || id == TensorId::kDk ||
                           id == TensorId::kDv || id == TensorId::kKvSegmentIds;
      const bool by_head = id == TensorId::kLse || id == TensorId::kDlse;  // [heads, tokens]
      bytes = Reordered(bytes, by_head ? 4 : 1, of_keys ? kv_order : q_order);
    }
    return tensors;
  };
  const TensorMap sorted = sort(shuffled);
  const TensorMap one = Solve(spec, sorted);
  for (const Placement& placement : {Ring(1),
                                     Ring(3, Layout::kZigzag),
                                     Ring(4, Layout::kStriped),
                                     {Layout::kContiguous, 3, 1, ScheduleKind::kAllGather},
                                     {Layout::kZigzag, 3, 1, ScheduleKind::kPassQ},
                                     {Layout::kStriped, 3, 2, ScheduleKind::kReplicatedQ}}) {
    SCOPED_TRACE(testing::Message()
                 << LayoutName(placement.layout) << " " << ScheduleKindName(placement.schedule));
    ExpectNear(sort(Solve(spec, shuffled, placement)), one);
    ExpectNear(Solve(spec, sorted, placement), one);
  }
}

// Keys that a mask hides from all, and queries that ids keep from all, may be anything.
TEST(ScoreTerms, WhatNobodySeesMayBeAnything) {
  AttentionSpec spec = DenseSpec(1, 70, 90, 4, 2, 16, 24);
  spec.options.segment_ids = true;
  TensorMap inputs = NormalInputs(spec, 7);
  const auto padded = [](int64_t t) { return t >= 60 || t % 11 == 5; };
  std::vector<int32_t> q_ids, kv_ids;
  for (int64_t i = 0; i < 70; ++i) q_ids.push_back(padded(i) ? -1 : 0);
  for (int64_t j = 0; j < 90; ++j) kv_ids.push_back(padded(j) ? -1 : 0);
  inputs[TensorId::kQSegmentIds] = Bytes(q_ids);
  inputs[TensorId::kKvSegmentIds] = Bytes(kv_ids);
  const auto fill = [&](TensorId id, int64_t row_floats, float value) {
    std::vector<float> values = Floats(inputs[id]);
    for (size_t row = 0; row * row_floats < values.size(); ++row) {
      if (!padded(static_cast<int64_t>(row))) continue;
      std::fill_n(values.begin() + row * row_floats, row_floats, value);
    }
    inputs[id] = Bytes(values);
  };
  const auto fill_all = [&](float value) {
    fill(TensorId::kQ, 4 * 16, value);
    fill(TensorId::kDout, 4 * 24, value);
    fill(TensorId::kK, 2 * 16, value);
    fill(TensorId::kV, 2 * 24, value);
  };
  for (const Placement& placement :
       {Ring(1), Ring(3, Layout::kZigzag), Ring(4, Layout::kStriped)}) {
    fill_all(1.0f);
    const TensorMap with_ones = Solve(spec, inputs, placement);
    for (const float garbage : {kNaN, kMinusInfinity, 3e38f}) {
      fill_all(garbage);
      ExpectNear(Solve(spec, inputs, placement), with_ones);
    }
  }
}

// NaN and +inf poison their row, of their head, and no other.
TEST(ScoreTerms, ABiasThatIsNoNumberReachesItsRowAlone) {
  AttentionSpec spec = DenseSpec(1, 40, 50, 4, 2, 16, 24);
  spec.options.bias = BiasForm{.per_head = true, .gradient = true};
  TensorMap inputs = NormalInputs(spec, 8);
  const TensorMap clean = Solve(spec, inputs, Ring(2));
  for (const float garbage : {kNaN, -kMinusInfinity}) {
    std::vector<float> bias = Floats(inputs[TensorId::kBias]);
    bias[(2 * 40 + 11) * 50 + 7] = garbage;
    TensorMap poisoned = inputs;
    poisoned[TensorId::kBias] = Bytes(bias);
    const TensorMap outputs = Solve(spec, poisoned, Ring(2));
    const std::vector<float> out = Floats(outputs.at(TensorId::kOut));
    const std::vector<float> expected = Floats(clean.at(TensorId::kOut));
    for (int64_t i = 0; i < 40; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t d = 0; d < 24; ++d) {
          const int64_t at = (i * 4 + h) * 24 + d;
          if (i == 11 && h == 2) {
            EXPECT_TRUE(std::isnan(out[at]));
          } else {
            EXPECT_EQ(out[at], expected[at]);
          }
        }
      }
    }
  }
}

// Without dlse a row's ds sum up to nothing, with dropout or not: a constant added to a row's
// scores changes lse alone.
TEST(ScoreTerms, TheBiasGradientOfARowSumsUpToDlse) {
  AttentionSpec spec = DenseSpec(2, 40, 50, 4, 2, 16, 24);
  spec.options.bias = BiasForm{.per_batch = true, .per_head = true, .gradient = true};
  spec.has_dlse = true;
  for (const uint32_t threshold : {0u, 20000u}) {
    spec.options.dropout.threshold = threshold;
    const TensorMap inputs = NormalInputs(spec, 9);
    const std::vector<float> dlse = Floats(inputs.at(TensorId::kDlse));
    const TensorMap outputs = Solve(spec, inputs, Ring(3));
    const std::vector<float> dbias = Floats(outputs.at(TensorId::kDbias));
    for (int64_t row = 0; row < 2 * 4 * 40; ++row) {
      double sum = 0, size = 0;
      for (int64_t j = 0; j < 50; ++j) {
        sum += dbias[row * 50 + j];
        size += std::abs(dbias[row * 50 + j]);
      }
      EXPECT_NEAR(sum, dlse[row], 1e-5 * (1 + size)) << "row " << row;
    }
  }
}

double Dot(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (size_t e = 0; e < std::min(a.size(), b.size()); ++e) sum += double{a[e]} * b[e];
  return sum;
}

// Everything that a request may have at once.
AttentionSpec SpecWithAll(bool bias_and_mask, bool dilated) {
  AttentionSpec spec = DenseSpec(2, 45, 45, 4, 2, 16, 24);
  AttentionOptions& options = spec.options;
  options.causal = true;
  options.window_left = 30;
  options.softcap = 4;
  options.sinks = true;
  options.segment_ids = true;
  options.alibi_slopes = {0.5f, 0.1f, 0.02f, 0.003f};
  options.dropout = {.threshold = 9000, .seed = 7, .first_query = 3};
  if (bias_and_mask) {
    options.bias = BiasForm{.per_batch = true, .per_head = true, .gradient = true};
    options.mask = MaskForm{.per_head = true};
  }
  if (dilated) options.dilation_levels = {{20, 1, {}, 0, 4}, {45, 3, {}, 1, 4}};
  spec.has_dlse = true;
  return spec;
}

// With all of it out is linear in v, and scores are bilinear in q and k: <dv, v> = <dout, out>,
// <dq, q> = <dk, k>; and every schedule computes what one rank does.
TEST(ScoreTerms, AllAtOnceKeepTheIdentitiesOnEverySchedule) {
  for (const bool dilated : {false, true}) {
    for (const bool bias_and_mask : {true, false}) {
      const AttentionSpec spec = SpecWithAll(bias_and_mask, dilated);
      const TensorMap inputs = NormalInputs(spec, 21);
      const TensorMap one = Solve(spec, inputs);
      std::vector<Placement> placements = {Ring(1),
                                           Ring(3, Layout::kZigzag),
                                           Ring(4, Layout::kStriped, 2),
                                           {Layout::kContiguous, 3, 1, ScheduleKind::kAllGather}};
      if (!(dilated && bias_and_mask)) {
        placements.push_back({Layout::kZigzag, 3, 1, ScheduleKind::kPassQ});
        placements.push_back({Layout::kStriped, 4, 1, ScheduleKind::kPassQ});
        placements.push_back({Layout::kContiguous, 3, 1, ScheduleKind::kReplicatedQ});
      }
      for (const Placement& placement : placements) {
        SCOPED_TRACE(testing::Message() << "dilated " << dilated << ", bias " << bias_and_mask
                                        << ", schedule " << static_cast<int>(placement.schedule));
        const TensorMap all = Solve(spec, inputs, placement);
        ExpectNear(all, one);
        const auto floats = [&](TensorId id) {
          return Floats(inputs.count(id) > 0 ? inputs.at(id) : all.at(id));
        };
        EXPECT_NEAR(Dot(floats(TensorId::kDv), floats(TensorId::kV)),
                    Dot(floats(TensorId::kDout), Floats(all.at(TensorId::kOut))), 1e-3);
        EXPECT_NEAR(Dot(floats(TensorId::kDq), floats(TensorId::kQ)),
                    Dot(floats(TensorId::kDk), floats(TensorId::kK)), 1e-3);
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::tests

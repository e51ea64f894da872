// Properties of sinks, of the gradients of lse and of the bias, for all inputs: identities between
// runs of the system itself, in combination with every other option.
#include <algorithm>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "tests/sweep/solve.h"

namespace ringattn::tests {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

AttentionSpec DenseSpec(int64_t sq, int64_t sk) {
  AttentionSpec spec;
  spec.shape = {.batch = 2,
                .seq_len_q = sq,
                .seq_len_kv = sk,
                .num_heads = 4,
                .num_kv_heads = 2,
                .head_dim = 16,
                .head_dim_v = 24,
                .cu_seqlens_q = {0, sq},
                .cu_seqlens_k = {0, sk}};
  spec.options.softmax_scale = 0.25;
  spec.has_dlse = true;
  return spec;
}

constexpr Placement kAlone = {Layout::kContiguous, 1, 1, ScheduleKind::kSingle};

std::vector<Placement> Placements() {
  return {
      kAlone,
      {Layout::kZigzag, 3, 1},
      {Layout::kContiguous, 8, 1},
      {Layout::kStriped, 4, 2},
      {Layout::kContiguous, 3, 1, ScheduleKind::kAllGather},
      {Layout::kZigzag, 2, 1, ScheduleKind::kAllGather, 1},
      {Layout::kZigzag, 3, 1, ScheduleKind::kPassQ},
      {Layout::kContiguous, 8, 1, ScheduleKind::kReplicatedQ},
  };
}

std::string NameOf(const Placement& placement) {
  return std::string(ScheduleKindName(placement.schedule)) + " " + LayoutName(placement.layout) +
         " over " + std::to_string(placement.world_size);
}

void ExpectNear(const std::vector<float>& a, const std::vector<float>& b, TensorId id,
                float tolerance = 1e-5f) {
  ASSERT_EQ(a.size(), b.size()) << TensorName(id);
  for (size_t e = 0; e < a.size(); ++e) {
    if (a[e] == b[e]) continue;  // equal infinities too
    ASSERT_LE(std::abs(a[e] - b[e]), tolerance * (1.0f + std::abs(b[e])))
        << TensorName(id) << " element " << e;
  }
}

// --- Sinks --------------------------------------------------------------------

// Returns [outer, axis, ...] without the axis's first element.
std::vector<float> Behind(const std::vector<float>& values, int64_t outer, int64_t axis) {
  const int64_t inner = static_cast<int64_t>(values.size()) / (outer * axis);
  std::vector<float> rest;
  for (int64_t o = 0; o < outer; ++o) {
    const auto begin = values.begin() + o * axis * inner;
    rest.insert(rest.end(), begin + inner, begin + axis * inner);
  }
  return rest;
}

// The same problem with one key more in front, of zeros, as is its value: its score is its bias
// alone, the sink. Positions are counted from the last key, so nothing else moves.
struct WithKey {
  AttentionSpec spec;
  TensorMap inputs;
};

WithKey SinkAsKey(const AttentionSpec& spec, const TensorMap& inputs) {
  const AttentionShape& shape = spec.shape;
  const int64_t sq = shape.seq_len_q, sk = shape.seq_len_kv, heads = shape.num_heads;
  WithKey with = {spec, inputs};
  with.spec.shape.seq_len_kv = sk + 1;
  with.spec.shape.cu_seqlens_k = {0, sk + 1};
  AttentionOptions& options = with.spec.options;
  options.sinks = false;
  options.dropout.first_key = spec.options.dropout.first_key - 1;
  options.bias = BiasForm{.per_head = true, .gradient = true};
  with.inputs.erase(TensorId::kSinks);
  for (const TensorId id : {TensorId::kK, TensorId::kV}) {
    const std::vector<uint8_t>& bytes = inputs.at(id);
    const int64_t row = static_cast<int64_t>(bytes.size()) / (shape.batch * sk);
    std::vector<uint8_t>& longer = with.inputs[id];
    longer.clear();
    for (int64_t b = 0; b < shape.batch; ++b) {
      longer.insert(longer.end(), row, 0);
      longer.insert(longer.end(), bytes.begin() + b * sk * row, bytes.begin() + (b + 1) * sk * row);
    }
  }
  const std::vector<float> sinks = Floats(inputs.at(TensorId::kSinks));
  std::vector<float> bias;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < sq; ++i) {
      // ALiBi's term of the key in front is taken back.
      const float slope = options.alibi_slopes.empty() ? 0.0f : options.alibi_slopes[h];
      bias.push_back(sinks[h] + slope * static_cast<float>(i + sk + 1 - sq));
      bias.insert(bias.end(), sk, 0.0f);
    }
  }
  with.inputs[TensorId::kBias] = Bytes(bias);
  if (spec.options.mask.has_value()) {
    const std::vector<uint8_t>& mask = inputs.at(TensorId::kMask);
    std::vector<uint8_t>& wider = with.inputs[TensorId::kMask];
    wider.clear();
    for (int64_t row = 0; row < static_cast<int64_t>(mask.size()) / sk; ++row) {
      wider.push_back(1);
      wider.insert(wider.end(), mask.begin() + row * sk, mask.begin() + (row + 1) * sk);
    }
  }
  return with;
}

// A sink counts once in each row on every ring and schedule, and it is neither scaled nor capped
// nor dropped.
TEST(RowTerms, ASinkIsAKeyWithoutAValue) {
  for (const bool masked : {true, false}) {
    AttentionSpec spec = DenseSpec(40, 50);
    AttentionOptions& options = spec.options;
    options.sinks = true;
    options.causal = true;
    options.softcap = 3.0;
    options.alibi_slopes = {0.5f, 0.25f, 0.0f, 0.125f};
    options.dropout = {.threshold = 9000, .seed = 7, .first_key = 1};
    if (masked) options.mask = MaskForm{};
    TensorMap inputs = NormalInputs(spec, 41);
    inputs[TensorId::kSinks] = Bytes({0.5f, -1.0f, 4.0f, kMinusInfinity});
    if (masked) {  // every seventh row sees no key
      std::vector<uint8_t>& mask = inputs[TensorId::kMask];
      for (int64_t i = 3; i < 40; i += 7) std::fill_n(mask.begin() + i * 50, 50, 0);
    }
    const WithKey with = SinkAsKey(spec, inputs);
    const TensorMap key = SolveBoth(with.spec, with.inputs, kAlone);
    std::vector<float> dsinks(4, 0.0f);
    const std::vector<float> dbias = Floats(key.at(TensorId::kDbias));
    for (int64_t row = 0; row < 4 * 40; ++row) dsinks[row / 40] += dbias[row * 51];
    for (const Placement& placement : Placements()) {
      SCOPED_TRACE(NameOf(placement));
      const TensorMap sink = SolveBoth(spec, inputs, placement);
      for (const TensorId id : {TensorId::kOut, TensorId::kLse, TensorId::kDq}) {
        ExpectNear(Floats(sink.at(id)), Floats(key.at(id)), id, 2e-5f);
      }
      for (const TensorId id : {TensorId::kDk, TensorId::kDv}) {
        ExpectNear(Floats(sink.at(id)), Behind(Floats(key.at(id)), 2, 51), id, 2e-5f);
      }
      ExpectNear(Floats(sink.at(TensorId::kDsinks)), dsinks, TensorId::kDsinks, 2e-5f);
    }
  }
}

TEST(RowTerms, ASinkOfMinusInfinityChangesNoBit) {
  AttentionSpec spec = DenseSpec(60, 50);
  spec.options.causal = true;  // ten rows see no key
  TensorMap inputs = NormalInputs(spec, 42);
  AttentionSpec with = spec;
  with.options.sinks = true;
  TensorMap with_inputs = inputs;
  with_inputs[TensorId::kSinks] = Bytes(std::vector<float>(4, kMinusInfinity));
  for (const Placement& placement : Placements()) {
    SCOPED_TRACE(NameOf(placement));
    const TensorMap none = SolveBoth(spec, inputs, placement);
    TensorMap sinks = SolveBoth(with, with_inputs, placement);
    EXPECT_EQ(Floats(sinks.at(TensorId::kDsinks)), std::vector<float>(4, 0.0f));
    sinks.erase(TensorId::kDsinks);
    EXPECT_EQ(sinks, none);
  }
}

// --- The gradient of lse --------------------------------------------------------

// lse does not read v; and gradients are linear in those that come in.
TEST(RowTerms, AGradientOfLseAloneReachesNoValue) {
  AttentionSpec spec = DenseSpec(60, 50);
  spec.options.causal = true;
  spec.options.softcap = 3.0;
  const TensorMap both = NormalInputs(spec, 43);
  TensorMap of_lse = both, of_out = both;
  of_lse[TensorId::kDout].assign(both.at(TensorId::kDout).size(), 0);
  of_out[TensorId::kDlse].assign(both.at(TensorId::kDlse).size(), 0);
  for (const Placement& placement : Placements()) {
    SCOPED_TRACE(NameOf(placement));
    const TensorMap lse = SolveBoth(spec, of_lse, placement);
    const TensorMap out = SolveBoth(spec, of_out, placement);
    const TensorMap all = SolveBoth(spec, both, placement);
    for (const float value : Floats(lse.at(TensorId::kDv))) ASSERT_EQ(value, 0.0f);
    for (const TensorId id : {TensorId::kDq, TensorId::kDk}) {
      std::vector<float> sum = Floats(lse.at(id));
      const std::vector<float> other = Floats(out.at(id));
      EXPECT_GT(*std::max_element(sum.begin(), sum.end()), 0.01f);
      for (size_t e = 0; e < sum.size(); ++e) sum[e] += other[e];
      ExpectNear(sum, Floats(all.at(id)), id);
    }
  }
}

// --- The gradient of the bias -----------------------------------------------------

// A constant added to a row's scores and to its sink changes lse alone.
TEST(RowTerms, ARowOfTheBiasGradientAndItsShareOfTheSinksAreDlse) {
  AttentionSpec spec = DenseSpec(40, 50);
  spec.options.bias = BiasForm{.per_batch = true, .per_head = true, .gradient = true};
  spec.options.sinks = true;
  for (const uint32_t threshold : {0u, 20000u}) {
    spec.options.dropout.threshold = threshold;
    TensorMap inputs = NormalInputs(spec, 44);
    const std::vector<float> sinks = {0.5f, -1.0f, 4.0f, 1.0f};
    inputs[TensorId::kSinks] = Bytes(sinks);
    const std::vector<float> dlse = Floats(inputs.at(TensorId::kDlse));
    const std::vector<float> dout = Floats(inputs.at(TensorId::kDout));
    const TensorMap outputs = SolveBoth(spec, inputs, {Layout::kZigzag, 3, 1});
    const std::vector<float> out = Floats(outputs.at(TensorId::kOut));
    const std::vector<float> lse = Floats(outputs.at(TensorId::kLse));
    const std::vector<float> dbias = Floats(outputs.at(TensorId::kDbias));
    std::vector<double> dsinks(4, 0.0);
    for (int64_t row = 0; row < 2 * 4 * 40; ++row) {  // [batch, heads, queries]
      const int64_t b = row / 160, h = row / 40 % 4, i = row % 40;
      double delta = -dlse[row], sum = 0, size = 0;
      for (int64_t d = 0; d < 24; ++d) {
        const int64_t at = ((b * 40 + i) * 4 + h) * 24 + d;
        delta += double{out[at]} * dout[at];
      }
      for (int64_t j = 0; j < 50; ++j) {
        sum += dbias[row * 50 + j];
        size += std::abs(dbias[row * 50 + j]);
      }
      const double share = -std::exp(double{sinks[h]} - lse[row]) * delta;
      dsinks[h] += share;
      EXPECT_NEAR(sum + share, dlse[row], 1e-5 * (1 + size + std::abs(share))) << "row " << row;
    }
    for (int64_t h = 0; h < 4; ++h) {
      EXPECT_NEAR(Floats(outputs.at(TensorId::kDsinks))[h], dsinks[h],
                  1e-4 * (1 + std::abs(dsinks[h])));
    }
  }
}

// Values that batch rows and heads share are one sum in one order, and 0 where there is no pair.
TEST(RowTerms, ASharedBiasGradientHasTheSameBitsAgain) {
  AttentionSpec spec = DenseSpec(60, 50);
  spec.options.causal = true;
  spec.options.dropout.threshold = 9000;
  for (const bool per_batch : {false, true}) {
    for (const bool per_head : {false, true}) {
      spec.options.bias = BiasForm{.per_batch = per_batch, .per_head = per_head, .gradient = true};
      const TensorMap inputs = NormalInputs(spec, 45);
      const std::vector<Placement> placements = {kAlone,
                                                 {Layout::kZigzag, 3, 1},
                                                 {Layout::kStriped, 4, 2},
                                                 {Layout::kZigzag, 3, 1, ScheduleKind::kAllGather}};
      for (const Placement& placement : placements) {
        SCOPED_TRACE(NameOf(placement));
        const TensorMap once = SolveBoth(spec, inputs, placement);
        EXPECT_EQ(SolveBoth(spec, inputs, placement), once);
        const std::vector<float> dbias = Floats(once.at(TensorId::kDbias));
        ASSERT_EQ(dbias.size(), (per_batch ? 2u : 1u) * (per_head ? 4u : 1u) * 60 * 50);
        for (size_t e = 0; e < dbias.size(); ++e) {
          const auto i = static_cast<int64_t>(e / 50 % 60), j = static_cast<int64_t>(e % 50);
          if (j > i + 50 - 60) {
            ASSERT_EQ(dbias[e], 0.0f) << i << ", " << j;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::tests

// The oracle's score terms: finite differences, known answers of Philox, sampled rows.
#include <cmath>
#include <limits>

#include "common/oracle/generator.h"
#include "common/oracle/numeric.h"
#include "common/oracle/oracle.h"
#include "common/oracle/pair_terms.h"
#include "gtest/gtest.h"

namespace ringattn::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

AttentionSpec BaseSpec() {
  AttentionSpec spec;
  spec.shape = {.batch = 2,
                .seq_len_q = 5,
                .seq_len_kv = 7,
                .num_heads = 4,
                .num_kv_heads = 2,
                .head_dim = 3,
                .head_dim_v = 2,
                .cu_seqlens_q = {0, 5},
                .cu_seqlens_k = {0, 7}};
  spec.options.softmax_scale = 0.6;
  return spec;
}

std::vector<AttentionSpec> Specs() {
  std::vector<AttentionSpec> specs;
  for (const bool before : {false, true}) {
    for (const bool shared : {false, true}) {
      AttentionSpec spec = BaseSpec();
      spec.options.softcap = 2.0;
      spec.options.bias = BiasForm{!shared, !shared, true, before, true};
      spec.has_dlse = shared;
      specs.push_back(spec);
      spec.options.dropout = {.threshold = 20000, .seed = 5};
      spec.options.alibi_slopes = {0.5f, 0.25f, 0.0f, 1.0f};
      spec.options.sinks = true;
      specs.push_back(spec);
      spec.options.mask = MaskForm{.per_head = true, .bits = before};
      spec.options.segment_ids = true;
      spec.options.causal = true;
      specs.push_back(spec);
      AttentionSpec packed = spec;
      packed.shape.packed = true;
      packed.shape.batch = 1;
      packed.shape.cu_seqlens_q = {0, 2, 5};
      packed.shape.cu_seqlens_k = {0, 4, 7};
      packed.options.alibi_slopes = {0.5f, 0.25f, 0.0f, 1.0f, 2.0f, 0.1f, 0.2f, 0.3f};
      specs.push_back(packed);
    }
  }
  return specs;
}

double Loss(const AttentionSpec& spec, const InputTensors& inputs) {
  Inputs forward = inputs.view();
  forward.dout = nullptr;
  const Result result = EvaluateAll(spec, forward);
  double loss = 0.0;
  for (size_t e = 0; e < result.out.exact.size(); ++e) {
    loss += result.out.exact[e] * Load(spec.dtype, inputs.dout.data(), static_cast<int64_t>(e));
  }
  for (size_t r = 0; r < result.lse.rows.size() && spec.has_dlse; ++r) {
    const RowId& row = result.lse.rows[r];
    if (result.lse.exact[r] == -kInfinity) continue;
    const int64_t at =
        (row.batch * spec.shape.num_heads + row.head) * spec.shape.seq_len_q + row.token;
    loss += result.lse.exact[r] * inputs.dlse[at];
  }
  return loss;
}

int64_t Same(int64_t e) { return e; }

// Compares differences of `loss` with the gradient, whose element e is memory_index(e) of the
// tensor.
template <typename LossOf, typename MemoryIndex>
void ExpectDerivative(const LossOf& loss, void* tensor, const RowSet& gradient, const char* name,
                      const MemoryIndex& memory_index) {
  for (size_t e = 0; e < gradient.exact.size(); ++e) {
    float* element = static_cast<float*>(tensor) + memory_index(static_cast<int64_t>(e));
    const float kept = *element;
    if (kept == -kInfinity) {
      EXPECT_EQ(gradient.exact[e], 0.0) << name;
      continue;
    }
    *element = kept + 0x1p-9f;
    const double high = *element, loss_high = loss();
    *element = kept - 0x1p-9f;
    const double low = *element, loss_low = loss();
    *element = kept;
    ASSERT_NEAR(gradient.exact[e], (loss_high - loss_low) / (high - low), 1e-4)
        << name << " element " << e;
  }
}

TEST(OracleTerms, GradientsAreDerivatives) {
  for (const AttentionSpec& spec : Specs()) {
    InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 3, true);
    const Result result = EvaluateAll(spec, inputs.view());
    const auto loss = [&] { return Loss(spec, inputs); };
    ExpectDerivative(loss, inputs.q.data(), result.dq, "dq", Same);
    ExpectDerivative(loss, inputs.k.data(), result.dk, "dk", Same);
    ExpectDerivative(loss, inputs.v.data(), result.dv, "dv", Same);
    const int64_t heads = spec.options.bias->per_head ? spec.shape.num_heads : 1;
    const int64_t dim = result.dbias.dim;
    ExpectDerivative(loss, inputs.bias.data(), result.dbias, "dbias", [&](int64_t e) {
      const RowId& row = result.dbias.rows[e / dim];
      return ((row.batch * heads + row.head) * spec.shape.seq_len_q + row.token) * dim + e % dim;
    });
  }
}

// --- Dilated levels -----------------------------------------------------------

std::vector<AttentionSpec> DilatedSpecs() {
  AttentionSpec spec = BaseSpec();
  spec.shape.seq_len_q = spec.shape.seq_len_kv = 9;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 9};
  spec.has_dlse = true;
  std::vector<AttentionSpec> specs;
  spec.options.dilation_levels = {{3, 1, {}, 0, 4}, {9, 2, {}, 0, 4}, {6, 3, 1, 1, 4}};
  specs.push_back(spec);
  spec.options.causal = true;
  spec.options.softcap = 2.0;
  spec.options.sinks = true;
  specs.push_back(spec);
  spec.options.dilation_levels = {{9, 4, {}, 0, 4}, {4, 2, 0, 0, 3}};  // some rows are in no level
  specs.push_back(spec);
  return specs;
}

// Each level's separate attention, and the weights of the levels: [row of out][level].
struct LevelResults {
  std::vector<Result> levels;
  std::vector<std::vector<double>> weights;
  std::vector<double> lse;
};

LevelResults EvaluateLevels(const AttentionSpec& spec, const InputTensors& inputs) {
  Inputs forward = inputs.view();
  forward.dout = nullptr;
  LevelResults results;
  for (const DilationLevel& level : spec.options.dilation_levels) {
    AttentionSpec alone = spec;
    alone.options.dilation_levels = {level};
    alone.options.sinks = spec.options.sinks && results.levels.empty();  // sinks count once
    results.levels.push_back(EvaluateAll(alone, forward));
  }
  for (size_t r = 0; r < results.levels[0].out.rows.size(); ++r) {
    double sum = 0.0;
    for (const Result& level : results.levels) sum += std::exp(level.lse.exact[r]);
    results.lse.push_back(std::log(sum));
    std::vector<double>& weights = results.weights.emplace_back();
    for (const Result& level : results.levels) {
      weights.push_back(sum == 0.0 ? 0.0 : std::exp(level.lse.exact[r]) / sum);
    }
  }
  return results;
}

// The definition in the paper: the levels' results, weighted by their exp(lse). With `fixed`,
// weighted by those constants.
double LevelLoss(const AttentionSpec& spec, const InputTensors& inputs,
                 const std::vector<std::vector<double>>* fixed = nullptr) {
  const AttentionShape& shape = spec.shape;
  const LevelResults results = EvaluateLevels(spec, inputs);
  const auto& weights = fixed != nullptr ? *fixed : results.weights;
  double loss = 0.0;
  for (size_t r = 0; r < results.lse.size(); ++r) {
    for (size_t l = 0; l < results.levels.size(); ++l) {
      for (int64_t d = 0; d < shape.head_dim_v; ++d) {
        const int64_t e = static_cast<int64_t>(r) * shape.head_dim_v + d;
        loss += weights[r][l] * results.levels[l].out.exact[e] *
                Load(spec.dtype, inputs.dout.data(), e);
      }
    }
    const RowId& row = results.levels[0].out.rows[r];
    if (results.lse[r] == -kInfinity) continue;
    loss += results.lse[r] *
            inputs.dlse[(row.batch * shape.num_heads + row.head) * shape.seq_len_q + row.token];
  }
  return loss;
}

// The oracle counts pairs in one softmax without level weights, but its gradients equal those of
// the weighted form.
TEST(OracleTerms, GradientsPassThroughTheWeightsOfDilatedLevels) {
  for (const AttentionSpec& spec : DilatedSpecs()) {
    InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 5, true);
    const Result result = EvaluateAll(spec, inputs.view());
    EXPECT_NEAR(LevelLoss(spec, inputs), Loss(spec, inputs), 1e-12);
    const auto loss = [&] { return LevelLoss(spec, inputs); };
    ExpectDerivative(loss, inputs.q.data(), result.dq, "dq", Same);
    ExpectDerivative(loss, inputs.k.data(), result.dk, "dk", Same);
    ExpectDerivative(loss, inputs.v.data(), result.dv, "dv", Same);
    if (spec.options.sinks) {
      ExpectDerivative(loss, inputs.sinks.data(), result.dsinks, "dsinks", Same);
    }
    // With constant weights much of dk would differ.
    const auto fixed = EvaluateLevels(spec, inputs).weights;
    auto* k = reinterpret_cast<float*>(inputs.k.data());
    int64_t others = 0;
    for (size_t e = 0; e < result.dk.exact.size(); ++e) {
      const float kept = k[e];
      k[e] = kept + 0x1p-9f;
      const double high = k[e], loss_high = LevelLoss(spec, inputs, &fixed);
      k[e] = kept - 0x1p-9f;
      const double low = k[e], loss_low = LevelLoss(spec, inputs, &fixed);
      k[e] = kept;
      others += std::abs(result.dk.exact[e] - (loss_high - loss_low) / (high - low)) > 1e-3;
    }
    EXPECT_GT(others, static_cast<int64_t>(result.dk.exact.size()) / 3);
  }
}

TEST(OracleTerms, SampledRowsEqualTheWhole) {
  for (const AttentionSpec& spec : Specs()) {
    const InputTensors inputs = GenerateInputs(spec, DataKind::kNormal, 4, true);
    const Result whole = EvaluateAll(spec, inputs.view());
    const RowSet rows = EvaluateBiasRows(spec, inputs.view(), whole.dbias.rows);
    EXPECT_EQ(rows.exact, whole.dbias.exact);
    EXPECT_EQ(rows.magnitude, whole.dbias.magnitude);
    const Result queries = EvaluateQueryRows(spec, inputs.view(), whole.out.rows);
    EXPECT_EQ(queries.out.exact, whole.out.exact);
    EXPECT_EQ(queries.dq.exact, whole.dq.exact);
    // Key rows, from statistics in fp32 precision.
    std::vector<float> lse(whole.lse.exact.size());
    for (size_t r = 0; r < whole.lse.rows.size(); ++r) {
      const RowId& row = whole.lse.rows[r];
      lse[(row.batch * spec.shape.num_heads + row.head) * spec.shape.seq_len_q + row.token] =
          static_cast<float>(whole.lse.exact[r]);
    }
    std::vector<float> out(whole.out.exact.begin(), whole.out.exact.end());
    const Inputs view = inputs.view();
    const Delta delta = DeltaOf(spec, out.data(), view.dout, view.dlse);
    const Result keys = EvaluateKeyRows(spec, view, whole.dk.rows, lse.data(), delta);
    for (size_t e = 0; e < keys.dk.exact.size(); ++e) {
      EXPECT_NEAR(keys.dk.exact[e], whole.dk.exact[e], 1e-5);
    }
    for (size_t e = 0; e < keys.dv.exact.size(); ++e) {
      EXPECT_NEAR(keys.dv.exact[e], whole.dv.exact[e], 1e-5);
    }
  }
}

TEST(OracleTerms, MasksAndIdsHidePairs) {
  AttentionSpec spec = BaseSpec();
  spec.options.mask = MaskForm{};
  spec.options.segment_ids = true;
  std::vector<uint8_t> mask(5 * 7, 1);
  mask[2 * 7 + 3] = 0;
  const std::vector<int32_t> q_ids = {0, 0, 0, 1, -1, 0, 0, 0, 0, 0};
  const std::vector<int32_t> kv_ids = {0, 0, 0, 0, 1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  const Inputs inputs{
      .mask = mask.data(), .q_segment_ids = q_ids.data(), .kv_segment_ids = kv_ids.data()};
  const PairTerms terms(spec, inputs);
  const auto sees = [&](int64_t b, int64_t i, int64_t j) {
    return terms.Of({b, 0, 0, i}, j).visible;
  };
  EXPECT_TRUE(sees(0, 0, 0));
  EXPECT_FALSE(sees(0, 2, 3));
  EXPECT_FALSE(sees(1, 2, 3));  // one mask for all heads
  EXPECT_FALSE(sees(0, 0, 4));
  EXPECT_TRUE(sees(0, 3, 4));
  EXPECT_FALSE(sees(0, 4, 5));  // a token with a negative id sees no key, not even itself
  EXPECT_TRUE(sees(1, 4, 5));
}

// Known answers published by the generator's authors.
TEST(Philox, KnownAnswers) {
  using Four = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox({0, 0, 0, 0}, {0, 0}), (Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// A lane is compared with the threshold: 0 keeps every pair, 65536 none.
TEST(Philox, LanesOfAKey) {
  DropoutForm dropout{.threshold = 1, .seed = 0};
  // Counter 0 and key 0: lanes d5e8 2766 | 8dc5 69e1 ..., low half first.
  EXPECT_TRUE(Keeps(dropout, 0, 0, 0, 0));
  dropout.threshold = 0xe8d5;
  EXPECT_TRUE(Keeps(dropout, 0, 0, 0, 0));
  dropout.threshold = 0xe8d6;
  EXPECT_FALSE(Keeps(dropout, 0, 0, 0, 0));
  // Key 1 has lane 1, key 8 lane 2, key 24 lane 6, of the same counter.
  for (const auto& [key, lane] :
       {std::pair<int64_t, uint32_t>{1, 0x6627}, {8, 0xc58d}, {9, 0xe169}, {24, 0xdbd8}}) {
    dropout.threshold = lane;
    EXPECT_TRUE(Keeps(dropout, 0, 0, 0, key)) << key;
    dropout.threshold = lane + 1;
    EXPECT_FALSE(Keeps(dropout, 0, 0, 0, key)) << key;
  }
}

}  // namespace
}  // namespace ringattn::oracle

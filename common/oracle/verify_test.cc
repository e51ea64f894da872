#include "common/oracle/verify.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "common/oracle/generator.h"
#include "common/oracle/numeric.h"
#include "common/oracle/verify_scan.h"
#include "gtest/gtest.h"

namespace ringattn::oracle {
namespace {

// A problem with correctly rounded outputs.
struct Solved {
  AttentionSpec spec;
  InputTensors inputs;
  std::vector<uint8_t> out, dq, dk, dv;
  std::vector<float> lse;

  Solved() {
    spec.dtype = DType::kBFloat16;
    spec.shape = {.batch = 2,
                  .seq_len_q = 90,
                  .seq_len_kv = 110,
                  .num_heads = 4,
                  .num_kv_heads = 2,
                  .head_dim = 16,
                  .head_dim_v = 24,
                  .cu_seqlens_q = {0, 90},
                  .cu_seqlens_k = {0, 110}};
    spec.options = {.softmax_scale = 0.25, .causal = true, .window_left = 40};
    Solve();
  }

  void Solve() {
    inputs = GenerateInputs(spec, DataKind::kNormal, 5, true);
    const Result result = EvaluateAll(spec, inputs.view());
    out = Rounded(result.out);
    dq = Rounded(result.dq);
    dk = Rounded(result.dk);
    dv = Rounded(result.dv);
    lse.resize(result.lse.rows.size());
    for (size_t at = 0; at < lse.size(); ++at) {
      const RowId& row = result.lse.rows[at];
      lse[(row.batch * 4 + row.head) * 90 + row.token] = static_cast<float>(result.lse.exact[at]);
    }
  }

  std::vector<uint8_t> Rounded(const RowSet& set) const {
    std::vector<uint8_t> data(set.exact.size() * BytesOf(spec.dtype));
    for (size_t e = 0; e < set.exact.size(); ++e) Store(spec.dtype, data.data(), e, set.exact[e]);
    return data;
  }
  Outputs outputs() const { return {out.data(), lse.data(), dq.data(), dk.data(), dv.data()}; }
  Outputs gradients() const { return {nullptr, nullptr, dq.data(), dk.data(), dv.data()}; }
};

std::vector<std::string> NamesIn(const Report& report) {
  std::vector<std::string> names;
  for (const TensorReport& tensor : report.tensors) names.push_back(TensorName(tensor.tensor));
  return names;
}

constexpr VerifyOptions kSampled = {.rows = 30, .whole_cost = 0};

TEST(Verify, WholeAndSampledPassOnWhatIsRight) {
  const Solved solved;
  for (const VerifyOptions& options : {VerifyOptions(), kSampled}) {
    const Report report = Verify(solved.spec, solved.inputs.view(), solved.outputs(), {}, options);
    EXPECT_EQ(NamesIn(report), (std::vector<std::string>{"out", "lse", "dq", "dk", "dv"}));
    EXPECT_TRUE(report.passed()) << report.ToString();
    EXPECT_TRUE(report.unjudged.empty());
    EXPECT_EQ(report.tensors[0].rows, options.whole_cost == 0 ? 30 : 2 * 90 * 4);
  }
}

TEST(Verify, SampledGradientsWithoutForwardTensors) {
  const Solved solved;
  const Report report = Verify(solved.spec, solved.inputs.view(), solved.gradients(), {}, kSampled);
  EXPECT_EQ(NamesIn(report), (std::vector<std::string>{"dq", "dk", "dv"}));
  EXPECT_TRUE(report.passed()) << report.ToString();

  VerifyOptions poor = kSampled;
  poor.statistics_cost = 0;
  const Report partial = Verify(solved.spec, solved.inputs.view(), solved.gradients(), {}, poor);
  EXPECT_EQ(NamesIn(partial), (std::vector<std::string>{"dq"}));
  ASSERT_EQ(partial.unjudged.size(), 2u);
  EXPECT_EQ(partial.unjudged[0].tensor, TensorId::kDk);
  EXPECT_EQ(partial.unjudged[1].tensor, TensorId::kDv);
  EXPECT_FALSE(partial.passed());
  EXPECT_FALSE(partial.mismatch());
  EXPECT_NE(partial.ToString().find("dk  not judged: too large without out and lse"),
            std::string::npos);
}

TEST(Verify, GradientsWithoutDoutDoNotPass) {
  const Solved solved;
  Inputs inputs = solved.inputs.view();
  inputs.dout = nullptr;
  for (const VerifyOptions& options : {VerifyOptions(), kSampled}) {
    const Report report = Verify(solved.spec, inputs, solved.outputs(), {}, options);
    EXPECT_EQ(NamesIn(report), (std::vector<std::string>{"out", "lse"}));
    ASSERT_EQ(report.unjudged.size(), 3u);
    EXPECT_NE(report.unjudged[0].reason.find("dout"), std::string::npos);
    EXPECT_FALSE(report.passed());
    EXPECT_FALSE(report.mismatch());
  }
}

TEST(Verify, TensorsWithoutRowsAreJudgedToo) {
  Solved solved;
  solved.spec.shape.seq_len_q = 0;
  solved.spec.shape.cu_seqlens_q = {0, 0};
  std::fill(solved.dk.begin(), solved.dk.end(), 0);
  std::fill(solved.dv.begin(), solved.dv.end(), 0);
  for (const VerifyOptions& options : {VerifyOptions(), VerifyOptions{.whole_cost = -1}}) {
    const Report report = Verify(solved.spec, solved.inputs.view(), solved.outputs(), {}, options);
    EXPECT_EQ(NamesIn(report), (std::vector<std::string>{"out", "lse", "dq", "dk", "dv"}));
    EXPECT_TRUE(report.passed()) << report.ToString();
  }
}

TEST(Verify, GivenForwardTensorsAreJudgedToo) {
  Solved solved;
  VerifyOptions poor = kSampled;
  poor.statistics_cost = 0;
  const ForwardTensors given = {solved.out.data(), solved.lse.data()};
  EXPECT_TRUE(Verify(solved.spec, solved.inputs.view(), solved.gradients(), given, poor).passed());
  for (float& value : solved.lse) value += 0.01f;
  const Report report = Verify(solved.spec, solved.inputs.view(), solved.gradients(), given, poor);
  EXPECT_EQ(NamesIn(report), (std::vector<std::string>{"out", "lse", "dq", "dk", "dv"}));
  EXPECT_FALSE(report.tensors[1].passed);
}

// Zeroes a hundredth of the tokens, away from the rows that would be sampled. Samples alone (30 of
// 720 rows) found them with 2 of 5 seeds.
TEST(Verify, FindsZeroedTokensWhateverTheSeed) {
  for (const TensorId tensor : {TensorId::kOut, TensorId::kDq, TensorId::kDk, TensorId::kDv}) {
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      Solved solved;
      std::vector<uint8_t>& data = tensor == TensorId::kOut  ? solved.out
                                   : tensor == TensorId::kDq ? solved.dq
                                   : tensor == TensorId::kDk ? solved.dk
                                                             : solved.dv;
      const size_t tokens = tensor == TensorId::kOut || tensor == TensorId::kDq ? 2 * 90 : 2 * 110;
      const size_t token_bytes = data.size() / tokens;
      const size_t token = 20 + 13 * seed;
      std::fill_n(data.begin() + token * token_bytes, token_bytes, 0);
      VerifyOptions options = kSampled;
      options.seed = seed;
      const Report report =
          Verify(solved.spec, solved.inputs.view(), solved.outputs(), {}, options);
      for (const TensorReport& judged : report.tensors) {
        if (judged.tensor != tensor) {
          // dk is checked with delta, which depends on out.
          const bool follows = tensor == TensorId::kOut && judged.tensor == TensorId::kDk;
          EXPECT_TRUE(judged.passed || follows) << report.ToString();
          continue;
        }
        EXPECT_FALSE(judged.passed) << report.ToString();
        EXPECT_GT(judged.suspects.value_or(0), 0);
      }
    }
  }
}

TEST(Verify, FindsOneElementThatCannotBeRight) {
  for (const double wrong : {std::nan(""), 1e30, -5.0}) {
    Solved solved;
    Store(DType::kBFloat16, solved.out.data(), 24 * (4 * 57 + 2) + 3, wrong);
    const Report report = Verify(solved.spec, solved.inputs.view(), solved.outputs(), {}, kSampled);
    EXPECT_FALSE(report.tensors[0].passed) << wrong;
    EXPECT_EQ(report.tensors[0].suspects, 1) << wrong;
    EXPECT_EQ(report.tensors[0].failed_elements, 1) << wrong;
    EXPECT_TRUE(report.tensors[1].passed);
  }
  Solved solved;
  solved.lse[90 * 5 + 33] = 40.0f;
  const Report report = Verify(solved.spec, solved.inputs.view(), solved.outputs(), {}, kSampled);
  EXPECT_TRUE(report.tensors[0].passed);
  EXPECT_FALSE(report.tensors[1].passed);
}

TEST(Verify, SaysHowManyRowsOfHowMany) {
  const Solved solved;
  const Report report = Verify(solved.spec, solved.inputs.view(), solved.outputs(), {}, kSampled);
  EXPECT_EQ(report.tensors[0].total_rows, 2 * 90 * 4);
  EXPECT_EQ(report.tensors[0].suspects, 0);
  EXPECT_NE(report.ToString().find("out ok    rows 30 of 720 (all scanned, 0 suspect)"),
            std::string::npos)
      << report.ToString();
  const Report whole = Verify(solved.spec, solved.inputs.view(), solved.outputs(), {}, {});
  EXPECT_FALSE(whole.tensors[0].suspects.has_value()) << "all rows are judged";
  EXPECT_NE(whole.ToString().find("rows 720 of 720"), std::string::npos);
}

// Masks of every kind: right results are never suspect, and rows that see nothing must be zeros.
TEST(Scan, FollowsEveryMask) {
  for (const int64_t sk : {60, 90, 200}) {
    for (const int64_t left : {-1, 0, 7}) {
      for (const int64_t right : {-1, 0, 5}) {
        for (const bool causal : {false, true}) {
          for (const double softcap : {0.0, 2.0}) {
            Solved solved;
            solved.spec.shape.seq_len_kv = sk;
            solved.spec.shape.cu_seqlens_k = {0, sk};
            solved.spec.options = {.softmax_scale = -0.25,
                                   .softcap = softcap,
                                   .causal = causal,
                                   .window_left = left,
                                   .window_right = right};
            solved.Solve();
            SCOPED_TRACE(testing::Message() << "sk " << sk << " left " << left << " right " << right
                                            << " causal " << causal);
            for (const auto& [tensor, suspects] :
                 Scan(solved.spec, solved.inputs.view(), solved.outputs(), 10)) {
              EXPECT_EQ(suspects.found, 0) << TensorName(tensor);
            }
            std::fill(solved.lse.begin(), solved.lse.end(), 3e4f);
            const auto found = Scan(solved.spec, solved.inputs.view(), solved.outputs(), 10);
            EXPECT_EQ(found.at(TensorId::kLse).found, 2 * 90 * 4);
            EXPECT_EQ(found.at(TensorId::kLse).rows.size(), 10u);
          }
        }
      }
    }
  }
}

TEST(Verify, FindsARowThatIsWrongEverywhere) {
  Solved solved;
  // One head's dv scaled by 2%: any sampled row shows it.
  for (int64_t row = 1; row < 2 * 110 * 2; row += 2) {
    for (int64_t d = 0; d < 24; ++d) {
      const int64_t element = row * 24 + d;
      Store(DType::kBFloat16, solved.dv.data(), element,
            1.02 * Load(DType::kBFloat16, solved.dv.data(), element));
    }
  }
  const Report report = Verify(solved.spec, solved.inputs.view(), solved.outputs(), {}, kSampled);
  EXPECT_FALSE(report.passed());
  EXPECT_FALSE(report.tensors[4].passed);
  EXPECT_EQ(report.tensors[4].norm_head, 1);
}

}  // namespace
}  // namespace ringattn::oracle

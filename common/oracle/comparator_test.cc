#include "common/oracle/comparator.h"

#include <cmath>
#include <limits>
#include <vector>

#include "common/oracle/generator.h"
#include "common/oracle/numeric.h"
#include "gtest/gtest.h"

namespace ringattn::oracle {
namespace {

struct Fixture {
  AttentionSpec spec;
  InputTensors inputs;
  Result result;
  std::vector<uint8_t> out, dq, dk, dv;
  std::vector<float> lse;

  explicit Fixture(DType dtype) {
    spec.dtype = dtype;
    spec.shape = {.batch = 1,
                  .seq_len_q = 40,
                  .seq_len_kv = 33,
                  .num_heads = 4,
                  .num_kv_heads = 2,
                  .head_dim = 16,
                  .head_dim_v = 8,
                  .cu_seqlens_q = {0, 40},
                  .cu_seqlens_k = {0, 33}};
    spec.options = {.softmax_scale = 0.25, .causal = true};  // seven rows see no key
    inputs = GenerateInputs(spec, DataKind::kNormal, 5, true);
    result = EvaluateAll(spec, inputs.view());
    out = Rounded(result.out);
    dq = Rounded(result.dq);
    dk = Rounded(result.dk);
    dv = Rounded(result.dv);
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t t = 0; t < 40; ++t) {
        lse.push_back(static_cast<float>(result.lse.exact[t * 4 + h]));
      }
    }
  }

  std::vector<uint8_t> Rounded(const RowSet& set) const {
    std::vector<uint8_t> data(set.exact.size() * BytesOf(spec.dtype));
    for (size_t e = 0; e < set.exact.size(); ++e) {
      Store(spec.dtype, data.data(), e, set.exact[e]);
    }
    return data;
  }

  Report Judge() const {
    return Compare(spec, result, {out.data(), lse.data(), dq.data(), dk.data(), dv.data()});
  }

  void Add(std::vector<uint8_t>& tensor, int64_t element, double amount) {
    Store(spec.dtype, tensor.data(), element, Load(spec.dtype, tensor.data(), element) + amount);
  }
};

class ComparatorTest : public testing::TestWithParam<DType> {};

TEST_P(ComparatorTest, CorrectlyRoundedPasses) {
  const Fixture fixture(GetParam());
  const Report report = fixture.Judge();
  EXPECT_EQ(report.tensors.size(), 5u);
  EXPECT_TRUE(report.passed()) << report.ToString();
}

TEST_P(ComparatorTest, OneNanFails) {
  Fixture fixture(GetParam());
  Store(GetParam(), fixture.dk.data(), 17, std::nan(""));
  const Report report = fixture.Judge();
  EXPECT_FALSE(report.passed());
  EXPECT_FALSE(report.tensors[3].passed);
  EXPECT_EQ(report.tensors[3].failed_elements, 1);
  EXPECT_EQ(report.tensors[3].element_row, (RowId{0, 0, 1}));
  EXPECT_EQ(report.tensors[3].element_column, 1);
  EXPECT_NE(report.ToString().find("dk  FAIL"), std::string::npos) << report.ToString();
}

// A NaN of the inputs reaches the results that depend on it and no others.
TEST_P(ComparatorTest, NanMustAppearWhereItIsExpected) {
  Fixture fixture(GetParam());
  Store(GetParam(), fixture.inputs.q.data(), 39 * 4 * 16 + 5, std::nan(""));  // token 39, head 0
  fixture.result = EvaluateAll(fixture.spec, fixture.inputs.view());
  fixture.out = fixture.Rounded(fixture.result.out);
  fixture.dq = fixture.Rounded(fixture.result.dq);
  fixture.dk = fixture.Rounded(fixture.result.dk);
  fixture.dv = fixture.Rounded(fixture.result.dv);
  fixture.lse[39] = static_cast<float>(fixture.result.lse.exact[39 * 4]);
  ASSERT_TRUE(std::isnan(fixture.lse[39]));
  EXPECT_TRUE(fixture.Judge().passed()) << fixture.Judge().ToString();
  for (const double wrong : {0.0, 1.0, std::numeric_limits<double>::infinity()}) {
    Store(GetParam(), fixture.out.data(), 39 * 4 * 8, wrong);
    EXPECT_FALSE(fixture.Judge().tensors[0].passed) << wrong;
    EXPECT_EQ(fixture.Judge().tensors[0].failed_elements, 1);
  }
  Store(GetParam(), fixture.out.data(), 39 * 4 * 8, std::nan(""));
  Store(GetParam(), fixture.out.data(), 38 * 4 * 8, std::nan(""));
  EXPECT_FALSE(fixture.Judge().tensors[0].passed);
  fixture.lse[39] = 1;
  EXPECT_FALSE(fixture.Judge().tensors[1].passed);
}

TEST_P(ComparatorTest, OneWrongElementFails) {
  Fixture fixture(GetParam());
  const double unit = ToleranceUnit(GetParam());
  fixture.Add(fixture.out, 39 * 32 + 5, 40.0 * unit * fixture.result.out.magnitude[39 * 32 + 5]);
  const Report report = fixture.Judge();
  EXPECT_FALSE(report.tensors[0].passed);
  EXPECT_TRUE(report.tensors[1].passed && report.tensors[2].passed);
}

TEST_P(ComparatorTest, RowsThatSeeNothingMustBeZero) {
  Fixture fixture(GetParam());
  Store(GetParam(), fixture.dq.data(), 3, 1e-6);
  EXPECT_FALSE(fixture.Judge().tensors[2].passed);
}

TEST_P(ComparatorTest, LseMaskMustMatch) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Fixture fixture(GetParam());
  ASSERT_EQ(fixture.lse[0], -kInfinity);
  for (const float wrong : {kInfinity, -1e30f, 0.0f, std::nanf("")}) {
    fixture.lse[0] = wrong;
    EXPECT_FALSE(fixture.Judge().tensors[1].passed) << wrong;
  }
  fixture.lse[0] = -kInfinity;
  EXPECT_TRUE(fixture.Judge().passed());
  fixture.lse[39] = -kInfinity;
  EXPECT_FALSE(fixture.Judge().tensors[1].passed);
}

TEST_P(ComparatorTest, SampledRowsAreJudgedInPlace) {
  Fixture fixture(GetParam());
  const auto rows = SampleQueryRows(fixture.spec, 12, 4);
  const Result sampled = EvaluateQueryRows(fixture.spec, fixture.inputs.view(), rows);
  const Outputs outputs = {fixture.out.data(), fixture.lse.data(), fixture.dq.data()};
  EXPECT_TRUE(Compare(fixture.spec, sampled, outputs).passed());
  // The last row is always sampled.
  fixture.Add(fixture.out, 40 * 4 * 8 - 1, 1.0);
  EXPECT_FALSE(Compare(fixture.spec, sampled, outputs).passed());
}

INSTANTIATE_TEST_SUITE_P(DTypes, ComparatorTest,
                         testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16));

// fp32 is excluded: there the norm rule's 1e-5 is as wide as the element rule.
TEST(Comparator, ASmallBiasEverywhereFailsByNorm) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    Fixture fixture(dtype);
    // Within the element rule, but many times the rounding error.
    for (int64_t t = 7; t < 40; ++t) {
      for (int64_t d = 0; d < 8; ++d) {
        const int64_t element = (t * 4 + 2) * 8 + d;
        fixture.Add(fixture.out, element,
                    6.0 * ToleranceUnit(dtype) * fixture.result.out.magnitude[element]);
      }
    }
    const TensorReport report = fixture.Judge().tensors[0];
    EXPECT_FALSE(report.passed);
    EXPECT_EQ(report.norm_head, 2);
    EXPECT_FALSE(report.norm.passed());
  }
}

// Rounding may cost half a unit in the last place of a subnormal, whatever the size of the terms; a
// whole unit fails. With one value per head, the element rule bounds independent errors in full,
// also if the twin happens to be exact.
TEST(Comparator, ASinksGradientIsJudgedAsOneValue) {
  Fixture f(DType::kBFloat16);
  f.spec.options.sinks = true;
  RowSet dsinks;
  for (int64_t h = 0; h < 4; ++h) dsinks.rows.push_back({0, 0, h});
  dsinks.dim = 1;
  dsinks.exact = dsinks.twin = {1.0, 2.0, -1.0, 0.5};
  dsinks.magnitude.assign(4, 1.0);
  dsinks.floor.assign(4, 0.0);
  std::vector<float> actual = {1.0f, 2.0f, -1.0f, 0.5f};
  const auto passed = [&] {
    return CompareTensor(f.spec, TensorId::kDsinks, dsinks, actual.data()).passed;
  };
  EXPECT_TRUE(passed());
  actual[2] += 6.0f / 512.0f;  // of 8 u
  EXPECT_TRUE(passed());
  actual[2] = -1.0f + 9.0f / 512.0f;
  EXPECT_FALSE(passed());
}

TEST(Comparator, SubnormalResultsMayBeHalfAUnitOff) {
  AttentionSpec spec;
  spec.dtype = DType::kFloat16;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = 1;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, 1};
  const uint16_t one = 0x3c00;
  for (const uint16_t v : {0x0001, 0x0040, 0x0080}) {  // from 2^-24 to 2^-17
    const Result expected = EvaluateAll(spec, {.q = &one, .k = &one, .v = &v});
    const double unit = expected.out.floor[0] / 0x1p-25;
    EXPECT_GT(unit, 1.0);
    EXPECT_LT(unit, 1.01);
    EXPECT_TRUE(CompareTensor(spec, TensorId::kOut, expected.out, &v).passed);
    const uint16_t off = v + 1;
    EXPECT_FALSE(CompareTensor(spec, TensorId::kOut, expected.out, &off).passed) << v;
  }
}

// A GPU's exponential flushes a P that fp32 would keep as a subnormal. Its term, multiplied by a
// large q, is lost too.
TEST(Comparator, ATermWhoseProbabilityUnderflowsMayBeLost) {
  AttentionSpec spec;
  spec.options.softmax_scale = 1;
  spec.shape.seq_len_q = 1;
  spec.shape.seq_len_kv = 2;
  spec.shape.cu_seqlens_q = {0, 1};
  spec.shape.cu_seqlens_k = {0, 2};
  const float q = 1000, k[] = {0, -0.088f}, v[] = {0, 1}, dout = 1;  // P = 1 and 6e-39
  const Result expected = EvaluateAll(spec, {.q = &q, .k = k, .v = v, .dout = &dout});
  const float full = static_cast<float>(expected.dk.exact[1]);
  EXPECT_GT(full, 1e-36f);
  float dk[] = {static_cast<float>(expected.dk.exact[0]), 0};
  EXPECT_TRUE(CompareTensor(spec, TensorId::kDk, expected.dk, dk).passed);
  dk[1] = 3 * full;
  EXPECT_FALSE(CompareTensor(spec, TensorId::kDk, expected.dk, dk).passed);
}

// A tensor-core kernel rounds P to fp16 before dropout's factor, which multiplies the loss of a
// subnormal P.
TEST(Comparator, ASubnormalProbabilityThatIsKeptMayBeHalfAUnitOffTimesTheFactor) {
  AttentionSpec spec;
  spec.dtype = DType::kFloat16;
  spec.options.softmax_scale = 1;
  spec.options.dropout.threshold = 60000;
  const double factor = 65536.0 / (65536 - 60000);
  spec.shape = {.seq_len_q = 1, .seq_len_kv = 2, .cu_seqlens_q = {0, 1}, .cu_seqlens_k = {0, 2}};
  const uint16_t q = 0x3c00, k[] = {0, 0xca00}, v[] = {0, 0x3c00};  // P = 1 and e^-12, 103.08 units
  const double p = std::exp(-12.0) / (1.0 + std::exp(-12.0));
  for (spec.options.dropout.seed = 0;; ++spec.options.dropout.seed) {
    const Result expected = EvaluateAll(spec, {.q = &q, .k = k, .v = v});
    if (expected.out.exact[0] == 0.0) continue;  // dropped
    ASSERT_NEAR(expected.out.exact[0], factor * p, 1e-9);
    // by the element rule; the norm rule needs many elements
    const auto passes = [&](double kept) {
      uint16_t out;
      Store(spec.dtype, &out, 0, factor * kept);
      return CompareTensor(spec, TensorId::kOut, expected.out, &out).failed_elements == 0;
    };
    EXPECT_TRUE(passes(p));
    EXPECT_TRUE(passes(p + 0x1p-25));
    EXPECT_FALSE(passes(p + 0x1p-23));
    break;
  }
}

// In a row whose heavy keys are all dropped, the remaining light keys may underflow in fp16. An out
// without them is right, and so are gradients from its delta. All elements of out have the same
// loss.
TEST(Comparator, DeltaMayLackAKeptWeightThatUnderflows) {
  AttentionSpec spec;
  spec.dtype = DType::kFloat16;
  spec.fp32_results = true;
  spec.options.softmax_scale = 1;
  spec.options.sinks = true;
  spec.options.dropout.threshold = 60000;
  spec.shape = {.seq_len_q = 1,
                .seq_len_kv = 2,
                .head_dim_v = 8,
                .cu_seqlens_q = {0, 1},
                .cu_seqlens_k = {0, 2}};
  const uint16_t q = 0x3c00, k[] = {0, 0xcd00};  // P = 1 and e^-20
  std::vector<uint16_t> v(16, 0x3c00), dout(8, 0x3c00);
  const float sink = 0.0f;
  const Inputs inputs = {.q = &q, .k = k, .v = v.data(), .dout = dout.data(), .sinks = &sink};
  const double light = std::exp(-20.0) * 65536.0 / (65536 - 60000);
  for (spec.options.dropout.seed = 0;; ++spec.options.dropout.seed) {
    const Result expected = EvaluateAll(spec, inputs);
    const double out = expected.out.exact[0];
    if (out == 0.0 || out > light) continue;  // both are dropped, or the heavy one is kept
    EXPECT_EQ(expected.out.twin[0], 0.0);
    ASSERT_NEAR(expected.dsinks.exact[0], -0.5 * 8.0 * out, 1e-6 * out);
    const auto passes = [&](double share) {
      const float actual = static_cast<float>(share * expected.dsinks.exact[0]);
      return CompareTensor(spec, TensorId::kDsinks, expected.dsinks, &actual).failed_elements == 0;
    };
    EXPECT_TRUE(passes(1.0));
    EXPECT_TRUE(passes(0.0));
    EXPECT_FALSE(passes(3.0));
    EXPECT_FALSE(passes(-1.0));
    break;
  }
}

TEST(Comparator, OverflowMustBeTheSameInfinity) {
  AttentionSpec spec;
  spec.dtype = DType::kFloat16;
  spec.shape = {.seq_len_q = 1, .seq_len_kv = 1, .cu_seqlens_q = {0, 1}, .cu_seqlens_k = {0, 1}};
  RowSet expected;
  expected.Resize({{0, 0, 0}}, 1);
  expected.exact = {1e6};
  expected.magnitude = {1e6};
  expected.twin = {std::numeric_limits<double>::infinity()};
  uint16_t actual = 0x7c00;
  EXPECT_TRUE(CompareTensor(spec, TensorId::kOut, expected, &actual).passed);
  actual = 0xfc00;
  EXPECT_FALSE(CompareTensor(spec, TensorId::kOut, expected, &actual).passed);
  actual = 0x7bff;
  EXPECT_FALSE(CompareTensor(spec, TensorId::kOut, expected, &actual).passed);
}

}  // namespace
}  // namespace ringattn::oracle

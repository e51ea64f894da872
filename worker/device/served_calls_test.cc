#include "worker/device/served_calls.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

// The rule of Hopper: its kernels serve multiples of 8 above 32, with score terms up to 128 and
// without a softcap backward; `ordered` controls deterministic order. sm80 or the exact family
// serves the rest.
std::string Family(const ChosenBy& by, bool ordered) {
  const bool tensor_cores = by.dtype != DType::kFloat32;
  const bool hopper = tensor_cores && by.head_dim > 32 && by.head_dim % 8 == 0;
  if (by.score_terms) {
    const bool fits = by.head_dim <= 128 && !(by.backward && (by.softcap || by.deterministic));
    return hopper && fits ? "sm90" : "simt";
  }
  if (by.deterministic) return hopper && ordered ? "sm90" : "simt";
  return hopper ? "sm90" : tensor_cores ? "sm80" : "simt";
}

std::vector<KernelRate> RatesOf(const std::vector<ServedCalls>& all) {
  std::vector<KernelRate> rates;
  for (const ServedCalls& served : all) {
    const Direction direction = served.backward ? Direction::kBackward : Direction::kForward;
    rates.push_back({served.family, served.dtypes, direction, 1.0, served.kind});
  }
  return rates;
}

// The measured call has the entry's kind, and a request is predicted with the rate of the family
// that the rule selects for it.
TEST(ServedCalls, RequestHasRateOfItsFamily) {
  for (const bool ordered : {false, true}) {
    const auto rule = [ordered](const ChosenBy& by) { return Family(by, ordered); };
    const std::vector<ServedCalls> all = ServedCallsBy(rule);
    for (const ServedCalls& served : all) {
      EXPECT_TRUE(served.kind.Covers(served.head_dim, served.head_dim));
      EXPECT_EQ(rule({served.dtypes.front(), served.backward, served.kind.score_terms,
                      served.kind.deterministic.value_or(false),
                      served.kind.softcap.value_or(false), served.head_dim}),
                served.family);
    }
    const std::vector<KernelRate> rates = RatesOf(all);
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      for (int bits = 0; bits < 16; ++bits) {
        ChosenBy by{dtype, bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8)};
        if (by.deterministic && !by.backward) continue;
        for (by.head_dim = 1; by.head_dim <= kMaxHeadDim; ++by.head_dim) {
          AttentionSpec spec;
          spec.dtype = dtype;
          spec.shape.head_dim = spec.shape.head_dim_v = by.head_dim;
          spec.options.segment_ids = by.score_terms;
          spec.options.deterministic = by.deterministic;
          spec.options.softcap = by.softcap ? 30 : 0;
          const KernelRate* const rate =
              RateOf(rates, spec, by.backward ? Direction::kBackward : Direction::kForward);
          ASSERT_NE(rate, nullptr) << DTypeName(dtype) << bits << " " << by.head_dim;
          ASSERT_EQ(rate->family, rule(by)) << DTypeName(dtype) << bits << " " << by.head_dim;
        }
      }
    }
  }
}

// A head dim that the copy engine cannot read excludes the Hopper kernels, even if the other head
// dim is suitable.
TEST(ServedCalls, BothHeadDimsCount) {
  const auto rates =
      RatesOf(ServedCallsBy([](const ChosenBy& by) { return Family(by, /*ordered=*/false); }));
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.options.segment_ids = true;
  const auto family = [&](int64_t head_dim, int64_t head_dim_v) {
    spec.shape.head_dim = head_dim;
    spec.shape.head_dim_v = head_dim_v;
    return RateOf(rates, spec, Direction::kForward)->family;
  };
  EXPECT_EQ(family(128, 64), "sm90");
  EXPECT_EQ(family(16, 128), "sm90");
  EXPECT_EQ(family(128, 60), "simt");
  EXPECT_EQ(family(64, 136), "simt");
}

TEST(ServedCalls, ExactKernelsAreMeasuredWhereTheyAreSlow) {
  for (const ServedCalls& served :
       ServedCallsBy([](const ChosenBy& by) { return Family(by, /*ordered=*/false); })) {
    const bool slow = served.kind.score_terms || served.kind.deterministic.value_or(false);
    if (served.family == "simt" && slow && served.kind.max_head_dim > 128) {
      EXPECT_GT(served.head_dim, 128);
    }
    if (served.family == "sm90") {
      EXPECT_EQ(served.head_dim, 128);
    }
    if (served.family == "sm80") {
      EXPECT_EQ(served.head_dim, 127);  // Hopper serves 128
    }
  }
}

// If one family serves everything, there is one rate for each of the few kinds that differ.
TEST(ServedCalls, SingleFamilyHasFewRates) {
  const auto all = ServedCallsBy([](const ChosenBy&) { return std::string("one"); });
  EXPECT_EQ(all.size(), 6u);  // forward, backward, deterministic; each with and without score terms
  for (const ServedCalls& served : all) {
    EXPECT_EQ(served.dtypes.size(), 3u);
    EXPECT_EQ(served.kind.min_head_dim, 1);
    EXPECT_EQ(served.kind.max_head_dim, kMaxHeadDim);
    EXPECT_FALSE(served.kind.softcap.has_value());
  }
}

// A forced family may lack some calls; these have no rate.
TEST(ServedCalls, UnservedCallsHaveNoRate) {
  const auto rates = RatesOf(ServedCallsBy([](const ChosenBy& by) {
    return std::string(by.dtype == DType::kFloat32 || by.head_dim % 8 != 0 ? "" : "sm90");
  }));
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.head_dim = spec.shape.head_dim_v = 64;
  EXPECT_NE(RateOf(rates, spec, Direction::kForward), nullptr);
  spec.shape.head_dim = 63;
  EXPECT_EQ(RateOf(rates, spec, Direction::kForward), nullptr);
  spec.shape.head_dim = 64;
  spec.dtype = DType::kFloat32;
  EXPECT_EQ(RateOf(rates, spec, Direction::kForward), nullptr);
}

}  // namespace
}  // namespace ringattn::worker

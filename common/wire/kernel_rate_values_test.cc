#include "common/wire/kernel_rate_values.h"

#include <limits>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

using Protos = google::protobuf::RepeatedPtrField<v1::KernelRate>;

TEST(KernelRateValues, RoundTrip) {
  KernelRate rate{"sm80", {DType::kBFloat16, DType::kFloat16}, Direction::kBackward, 3.5e14};
  Protos protos;
  *protos.Add() = ToProto(rate);
  const std::vector<KernelRate> read = KernelRatesOf(protos);
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].family, "sm80");
  EXPECT_EQ(read[0].dtypes, rate.dtypes);
  EXPECT_EQ(read[0].direction, Direction::kBackward);
  EXPECT_EQ(read[0].flops_per_second, 3.5e14);
  EXPECT_EQ(read[0].kind, RequestKind());
  rate.kind = {.score_terms = true,
               .deterministic = false,
               .softcap = true,
               .min_head_dim = 40,
               .max_head_dim = 128,
               .head_dim_multiple = 8};
  protos.Clear();
  *protos.Add() = ToProto(rate);
  EXPECT_EQ(KernelRatesOf(protos)[0].kind, rate.kind);
}

// A rate without a kind covers all head dims, deterministic or not.
TEST(KernelRateValues, UnsetKindsAreAll) {
  Protos protos;
  protos.Add()->set_flops_per_second(1);
  const RequestKind kind = KernelRatesOf(protos)[0].kind;
  EXPECT_EQ(kind, RequestKind());
  EXPECT_TRUE(kind.Covers(1, 256));
}

TEST(KernelRateValues, WhatIsNoRateIsLeftOut) {
  Protos protos;
  for (const double flops : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    *protos.Add() = ToProto(KernelRate{"x", {DType::kFloat32}, {}, flops});
  }
  EXPECT_TRUE(KernelRatesOf(protos).empty());
}

}  // namespace
}  // namespace ringattn

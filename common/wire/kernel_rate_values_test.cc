#include "common/wire/kernel_rate_values.h"

#include <limits>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(KernelRateValues, RoundTrip) {
  const KernelRate rate{"sm80", {DType::kBFloat16, DType::kFloat16}, Direction::kBackward, 3.5e14};
  v1::Register registration;
  *registration.add_kernel_rates() = ToProto(rate);
  const std::vector<KernelRate> read = KernelRatesOf(registration);
  ASSERT_EQ(read.size(), 1u);
  EXPECT_EQ(read[0].family, "sm80");
  EXPECT_EQ(read[0].dtypes, rate.dtypes);
  EXPECT_EQ(read[0].direction, Direction::kBackward);
  EXPECT_EQ(read[0].flops_per_second, 3.5e14);
}

TEST(KernelRateValues, WhatIsNoRateIsLeftOut) {
  v1::Register registration;
  for (const double flops : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    *registration.add_kernel_rates() = ToProto(KernelRate{"x", {DType::kFloat32}, {}, flops});
  }
  EXPECT_TRUE(KernelRatesOf(registration).empty());
}

}  // namespace
}  // namespace ringattn

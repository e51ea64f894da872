#include "common/observability/log_throttle.h"

#include <string>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1000);

TEST(LogThrottleTest, ABurstPassesAndTheRestIsCounted) {
  LogThrottle throttle({.burst = 3, .lines_per_second = 2});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(throttle.Admit("a", kStart), 0);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(throttle.Admit("a", kStart), std::nullopt);
  EXPECT_EQ(throttle.Admit("b", kStart), 0);  // each kind has its own limit
  EXPECT_EQ(throttle.Admit("a", kStart + absl::Milliseconds(500)), 5);
  EXPECT_EQ(throttle.Admit("a", kStart + absl::Milliseconds(500)), std::nullopt);
  // After a long pause the limit is still one burst.
  int passed = 0;
  for (int i = 0; i < 10; ++i) passed += throttle.Admit("a", kStart + absl::Hours(1)).has_value();
  EXPECT_EQ(passed, 3);
}

TEST(LogThrottleTest, ItsMemoryIsBounded) {
  LogThrottle throttle({.burst = 1, .lines_per_second = 1, .max_kinds = 2});
  EXPECT_EQ(throttle.Admit("a", kStart), 0);
  EXPECT_EQ(throttle.Admit("b", kStart), 0);
  // The third kind and all later ones share one limit.
  EXPECT_EQ(throttle.Admit("c", kStart), 0);
  EXPECT_EQ(throttle.Admit("d", kStart), std::nullopt);
  EXPECT_EQ(throttle.Admit("e", kStart), std::nullopt);
}

}  // namespace
}  // namespace ringattn

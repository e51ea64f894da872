#include "common/base/monotonic_time.h"

#include <thread>

#include "absl/time/clock.h"
#include "common/base/testing/wall_clock.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

class MonotonicTimeTest : public testing::Test {
 protected:
  ~MonotonicTimeTest() override { SetWallClockBack(absl::ZeroDuration()); }
};

TEST_F(MonotonicTimeTest, DoesNotFollowTheWallClock) {
  const absl::Time monotonic = MonotonicNow(), wall = absl::Now();
  SetWallClockBack(absl::Hours(2));
  EXPECT_LT(absl::Now(), wall - absl::Hours(1));
  EXPECT_GE(MonotonicNow(), monotonic);
  SetWallClockBack(-absl::Hours(2));
  EXPECT_LT(MonotonicNow(), monotonic + absl::Minutes(1));
}

TEST_F(MonotonicTimeTest, ConvertsWallTimesAtThePresentOffset) {
  SetWallClockBack(absl::Hours(2));
  const absl::Duration left = ToMonotonic(absl::Now() + absl::Seconds(50)) - MonotonicNow();
  EXPECT_LT(absl::AbsDuration(left - absl::Seconds(50)), absl::Seconds(5));
  EXPECT_EQ(ToMonotonic(absl::InfiniteFuture()), absl::InfiniteFuture());
}

TEST_F(MonotonicTimeTest, AwaitUntilWaitsForItsDeadline) {
  absl::Mutex mutex;
  bool is_set = false;
  absl::MutexLock lock(&mutex);
  SetWallClockBack(-absl::Hours(2));
  const absl::Time begin = MonotonicNow();
  EXPECT_FALSE(AwaitUntil(mutex, absl::Condition(&is_set), begin + absl::Milliseconds(30)));
  EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(30));
  is_set = true;
  EXPECT_TRUE(AwaitUntil(mutex, absl::Condition(&is_set), absl::InfiniteFuture()));
}

TEST_F(MonotonicTimeTest, NotifyEndsOneWait) {
  Wakeup wakeup;
  wakeup.Notify();
  EXPECT_TRUE(wakeup.WaitFor(absl::Seconds(20)));
  EXPECT_FALSE(wakeup.WaitFor(absl::Milliseconds(1)));
  std::thread other([&] { wakeup.Notify(); });
  EXPECT_TRUE(wakeup.WaitFor(absl::InfiniteDuration()));
  other.join();
}

}  // namespace
}  // namespace ringattn

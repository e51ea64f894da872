#include "worker/service/watchdog.h"

#include <atomic>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(Watchdog, FiresOnceAfterTheLimitAndNamesTheWork) {
  absl::Mutex mutex;
  std::string struck;
  std::atomic<int> count{0};
  Watchdog watchdog([&](const std::string& what) {
    absl::MutexLock lock(&mutex);
    struck = what;
    ++count;
  });
  watchdog.Arm(absl::Milliseconds(30), "the work");
  for (int i = 0; i < 2000 && count == 0; ++i) absl::SleepFor(absl::Milliseconds(5));
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(count, 1);
  absl::MutexLock lock(&mutex);
  EXPECT_EQ(struck, "the work");
}

TEST(Watchdog, DoesNotFireForDisarmedOrRearmedWork) {
  std::atomic<int> count{0};
  Watchdog watchdog([&](const std::string&) { ++count; });
  for (int i = 0; i < 20; ++i) {
    watchdog.Arm(absl::Seconds(20), "quick work");
    watchdog.Disarm();
  }
  watchdog.Arm(absl::Milliseconds(1), "work that ends in time");
  watchdog.Arm(absl::Seconds(30), "other work");
  absl::SleepFor(absl::Milliseconds(50));
  // The first bound may have expired before the second Arm.
  EXPECT_LE(count, 1);
}

}  // namespace
}  // namespace ringattn::worker

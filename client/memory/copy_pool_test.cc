#include "client/memory/copy_pool.h"

#include <atomic>
#include <numeric>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

void CopyAndWait(CopyPool& pool, const std::vector<CopyPool::Piece>& pieces) {
  absl::Notification done;
  pool.Copy(
      pieces, [] { return true; }, [&] { done.Notify(); });
  done.WaitForNotification();
}

TEST(CopyPoolTest, CopiesEveryByteOnce) {
  for (const int threads : {1, 3}) {
    CopyPool pool(threads, absl::Minutes(1), [] {});
    std::vector<uint8_t> from(21'000'001), to(from.size() + 2, 0xee);
    std::iota(from.begin(), from.end(), 0);
    // Two pieces that are not multiples of the unit, and an empty one.
    CopyAndWait(pool, {{to.data() + 1, from.data(), 9'000'000},
                       {nullptr, nullptr, 0},
                       {to.data() + 9'000'001, from.data() + 9'000'000, 12'000'001}});
    EXPECT_EQ(to.front(), 0xee);
    EXPECT_EQ(to.back(), 0xee);
    EXPECT_TRUE(std::equal(from.begin(), from.end(), to.begin() + 1));
    CopyAndWait(pool, {});
  }
}

TEST(CopyPoolTest, UnwantedWorkIsSkipped) {
  CopyPool pool(1, absl::Minutes(1), [] {});
  std::vector<uint8_t> from(64 << 20, 1), to(from.size(), 0);
  absl::Notification done;
  std::atomic<int> asked{0};
  pool.Copy(
      {{to.data(), from.data(), to.size()}}, [&] { return ++asked < 3; }, [&] { done.Notify(); });
  done.WaitForNotification();
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(to.front(), 1);
  EXPECT_EQ(to.back(), 0);
}

TEST(CopyPoolTest, DestructionCompletesPendingWork) {
  std::atomic<int> done{0};
  {
    CopyPool pool(2, absl::Minutes(1), [] {});
    for (int i = 0; i < 100; ++i) pool.Add([&] { ++done; });
  }
  EXPECT_EQ(done, 100);
}

TEST(CopyPoolTest, IdlenessIsNoticed) {
  std::atomic<int> idle{0};
  CopyPool pool(2, absl::Milliseconds(10), [&] { ++idle; });
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(idle, 0);  // no work was ever added, so the pool has not started threads
  pool.Add([] {});
  for (int i = 0; i < 1000 && idle < 3; ++i) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_GE(idle, 3);
}

}  // namespace
}  // namespace ringattn::client

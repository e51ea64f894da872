#include "worker/region/work_count.h"

#include <atomic>
#include <functional>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(WorkCountTest, TheLastOfWhatHasEndedIsOne) {
  bool ended = false;
  WorkCount count([&] { return ended; });
  count.Add();
  EXPECT_FALSE(count.Leave());  // the last, and it goes on
  count.Add();
  count.Add();
  ended = true;
  EXPECT_FALSE(count.Leave());
  EXPECT_TRUE(count.Leave());
  count.Add();  // comes too late
  EXPECT_FALSE(count.Leave());
}

// What a worker once lost an operation's memory to: one piece asks whether it has ended and is told
// no; the end comes, and its own piece comes and goes before the first has counted itself out.
TEST(WorkCountTest, AnEndThatComesBesideTheLastPieceIsSeen) {
  std::atomic<bool> ended{false};
  std::function<void()> beside;  // what happens while the first to ask is being answered
  WorkCount count([&] {
    const bool answer = ended;
    if (beside) std::exchange(beside, nullptr)();
    return answer;
  });
  std::atomic<int> last{0};
  absl::Notification gone;
  std::thread end;
  beside = [&] {
    end = std::thread([&] {
      ended = true;
      count.Add();
      last += count.Leave() ? 1 : 0;
      gone.Notify();
    });
    // It cannot come and go under the lock; where it can it has done so by then.
    gone.WaitForNotificationWithTimeout(absl::Milliseconds(200));
  };
  count.Add();
  last += count.Leave() ? 1 : 0;
  end.join();
  EXPECT_EQ(last, 1);
}

}  // namespace
}  // namespace ringattn::worker

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

TEST(WorkCountTest, ExactlyOneIsLastAfterTheEnd) {
  bool ended = false;
  WorkCount count([&] { return ended; });
  count.Add();
  EXPECT_FALSE(count.Leave());  // the last one, but the operation has not ended
  count.Add();
  count.Add();
  ended = true;
  EXPECT_FALSE(count.Leave());
  EXPECT_TRUE(count.Leave());
  count.Add();  // added too late
  EXPECT_FALSE(count.Leave());
}

// A race: the last piece of work reads `ended` as false. The operation ends, and the piece that it
// adds comes and goes before the first one leaves. One of them must be the last.
TEST(WorkCountTest, EndDuringLastPieceIsNoticed) {
  std::atomic<bool> ended{false};
  std::function<void()> beside;  // what happens while the first one reads `ended`
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
    // The other piece blocks if the lock is held. Otherwise it has come and gone by now.
    gone.WaitForNotificationWithTimeout(absl::Milliseconds(200));
  };
  count.Add();
  last += count.Leave() ? 1 : 0;
  end.join();
  EXPECT_EQ(last, 1);
}

}  // namespace
}  // namespace ringattn::worker

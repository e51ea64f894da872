#include "worker/device/host_queue.h"

#include <atomic>

#include "common/base/monotonic_time.h"
#include "common/base/testing/wall_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

absl::Time Soon() { return MonotonicNow() + absl::Seconds(10); }

TEST(HostQueue, RunsInStartOrder) {
  HostQueue queue("test");
  std::vector<int> order;
  EventRef last;
  for (int i = 0; i < 100; ++i) {
    last = queue.Start(
        [&order, i] {
          order.push_back(i);
          return absl::OkStatus();
        },
        {}, HostQueue::OnFailure::kSkip);
  }
  ASSERT_TRUE(last->Wait(Soon()).ok());
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(order.size(), 100u);
}

TEST(HostQueue, WaitsForOtherEventsAndReportsIt) {
  HostQueue queue("test");
  auto gate = std::make_shared<HostEvent>();
  std::atomic<bool> ran{false};
  EventRef done = queue.Start(
      [&] {
        ran = true;
        return absl::OkStatus();
      },
      {gate}, HostQueue::OnFailure::kSkip);
  const absl::Time patience = Soon();
  while (!queue.waiting() && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(queue.waiting());
  EXPECT_FALSE(ran);
  EXPECT_EQ(done->Wait(absl::Now()).code(), absl::StatusCode::kDeadlineExceeded);
  gate->Finish(absl::OkStatus());
  EXPECT_TRUE(done->Wait(Soon()).ok());
  EXPECT_TRUE(ran);
  EXPECT_FALSE(queue.waiting());
  EXPECT_GE(done->begin_time(), gate->end_time());
}

TEST(HostQueue, TimesDoNotFollowTheWallClock) {
  HostQueue queue("test");
  const EventRef done = queue.Start(
      [] {
        SetWallClockBack(absl::Hours(2));
        return absl::OkStatus();
      },
      {}, HostQueue::OnFailure::kSkip);
  EXPECT_TRUE(done->Wait(Soon()).ok());
  SetWallClockBack(absl::ZeroDuration());
  EXPECT_LE(done->begin_time(), done->end_time());
  EXPECT_LT(done->end_time() - done->begin_time(), absl::Minutes(1));
}

TEST(HostQueue, FailurePropagatesUnlessWorkMustRun) {
  HostQueue queue("test");
  EventRef failed = queue.Start([] { return absl::UnavailableError("peer gone"); }, {},
                                HostQueue::OnFailure::kSkip);
  bool skipped_ran = false, forced_ran = false;
  EventRef skipped = queue.Start(
      [&] {
        skipped_ran = true;
        return absl::OkStatus();
      },
      {failed}, HostQueue::OnFailure::kSkip);
  EventRef forced = queue.Start(
      [&] {
        forced_ran = true;
        return absl::OkStatus();
      },
      {failed}, HostQueue::OnFailure::kRun);
  EXPECT_EQ(skipped->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(forced->Wait(Soon()).ok());
  EXPECT_FALSE(skipped_ran);
  EXPECT_TRUE(forced_ran);
}

TEST(HostQueue, DestructorFinishesStartedWork) {
  std::atomic<int> ran{0};
  {
    HostQueue queue("test");
    for (int i = 0; i < 20; ++i) {
      queue.Start(
          [&] {
            ++ran;
            return absl::OkStatus();
          },
          {}, HostQueue::OnFailure::kSkip);
    }
  }
  EXPECT_EQ(ran, 20);
}

}  // namespace
}  // namespace ringattn::worker

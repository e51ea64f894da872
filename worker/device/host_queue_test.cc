#include "worker/device/host_queue.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

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

TEST(HostQueue, AnIdleQueueRunsWorkOnItsCaller) {
  HostQueue queue("test");
  std::thread::id by;
  const EventRef done = queue.RunOrStart(
      [&] {
        by = std::this_thread::get_id();
        return absl::CancelledError("its own");
      },
      {}, HostQueue::OnFailure::kSkip);
  EXPECT_TRUE(done->Done());
  EXPECT_EQ(by, std::this_thread::get_id());
  EXPECT_EQ(done->Wait(Soon()), absl::CancelledError("its own"));
}

TEST(HostQueue, WorkOfACallerKeepsItsPlaceInABusyQueue) {
  HostQueue queue("test");
  auto gate = std::make_shared<HostEvent>();
  std::vector<int> order;
  const auto append = [&order](int value) {
    return [&order, value] {
      order.push_back(value);
      return absl::OkStatus();
    };
  };
  queue.Start(append(1), {gate}, HostQueue::OnFailure::kSkip);
  const EventRef second = queue.RunOrStart(append(2), {}, HostQueue::OnFailure::kSkip);
  EXPECT_FALSE(second->Done());
  gate->Finish(absl::OkStatus());
  ASSERT_TRUE(second->Wait(Soon()).ok());
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(HostQueue, WorkOfACallerWaitsForItsEventsOnTheQueue) {
  HostQueue queue("test");
  auto gate = std::make_shared<HostEvent>();
  std::thread::id by;
  const EventRef done = queue.RunOrStart(
      [&] {
        by = std::this_thread::get_id();
        return absl::OkStatus();
      },
      {gate}, HostQueue::OnFailure::kSkip);
  EXPECT_FALSE(done->Done());
  gate->Finish(absl::OkStatus());
  ASSERT_TRUE(done->Wait(Soon()).ok());
  EXPECT_NE(by, std::this_thread::get_id());
}

TEST(HostQueue, OneItemAtATimeOnAnyThread) {
  HostQueue queue("test");
  std::atomic<int> running{0};
  std::atomic<bool> overlapped{false};
  const auto work = [&] {
    if (running.fetch_add(1) != 0) overlapped = true;
    absl::SleepFor(absl::Microseconds(50));
    running.fetch_sub(1);
    return absl::OkStatus();
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      for (int round = 0; round < 200; ++round) {
        const EventRef done = (i + round) % 2 == 0
                                  ? queue.RunOrStart(work, {}, HostQueue::OnFailure::kSkip)
                                  : queue.Start(work, {}, HostQueue::OnFailure::kSkip);
        EXPECT_TRUE(done->Wait(Soon()).ok());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_FALSE(overlapped);
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

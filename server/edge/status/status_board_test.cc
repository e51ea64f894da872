#include "server/edge/status/status_board.h"

#include <atomic>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

ServerStatus Generation(uint64_t generation) {
  ServerStatus status;
  status.core.generation = generation;
  return status;
}

// Does what the core's thread does on each tick.
class Ticker {
 public:
  explicit Ticker(StatusBoard* board)
      : thread_([this, board] {
          while (!stop_) {
            if (board->PublishIsDue(absl::Now()))
              board->Publish(Generation(++published_), absl::Now());
            absl::SleepFor(absl::Milliseconds(1));
          }
        }) {}
  ~Ticker() {
    stop_ = true;
    thread_.join();
  }
  uint64_t published() const { return published_; }

 private:
  std::atomic<bool> stop_ = false;
  std::atomic<uint64_t> published_ = 0;
  std::thread thread_;
};

TEST(StatusBoardTest, NoSnapshotIsMadeWithoutViewers) {
  StatusBoard board({.min_interval = absl::Milliseconds(1)});
  const Ticker ticker(&board);
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(ticker.published(), 0u);
  EXPECT_NE(board.Look(absl::Seconds(10)), nullptr);
  EXPECT_GE(ticker.published(), 1u);
}

TEST(StatusBoardTest, ViewersShareASnapshot) {
  StatusBoard board({.min_interval = absl::Seconds(60), .max_waiting = 16});
  const Ticker ticker(&board);
  std::vector<std::thread> lookers;
  std::atomic<int> seen = 0;
  for (int i = 0; i < 16; ++i) {
    lookers.emplace_back([&] {
      for (int n = 0; n < 20; ++n) {
        const auto status = board.Look(absl::Seconds(10));
        if (status != nullptr && status->core.generation == 1) ++seen;
      }
    });
  }
  for (std::thread& looker : lookers) looker.join();
  EXPECT_EQ(seen, 16 * 20);
  EXPECT_EQ(ticker.published(), 1u);
}

TEST(StatusBoardTest, AStuckCoreYieldsTheLastSnapshotAfterThePatience) {
  StatusBoard board({.min_interval = absl::Milliseconds(1)});
  EXPECT_EQ(board.Look(absl::Milliseconds(20)), nullptr);
  board.Publish(Generation(7), absl::Now());
  absl::SleepFor(absl::Milliseconds(5));
  const absl::Time start = absl::Now();
  const auto status = board.Look(absl::Milliseconds(20));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(20));
  ASSERT_NE(status, nullptr);
  EXPECT_EQ(status->core.generation, 7u);
  EXPECT_FALSE(board.PublishIsDue(absl::Now()));
}

TEST(StatusBoardTest, OnlyABoundedNumberWaitsForAStuckCore) {
  StatusBoard board({.max_waiting = 2});
  std::vector<std::thread> waiting;
  for (int i = 0; i < 2; ++i) {
    waiting.emplace_back([&] {  // repeats if the look below was first
      while (board.Look(absl::Seconds(30)) == nullptr) absl::SleepFor(absl::Milliseconds(1));
    });
  }
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  absl::Duration took = absl::InfiniteDuration();
  // Once both are waiting, a third is answered immediately.
  while (took > absl::Milliseconds(5) && absl::Now() < deadline) {
    const absl::Time start = absl::Now();
    EXPECT_EQ(board.Look(absl::Milliseconds(10)), nullptr);
    took = absl::Now() - start;
    // Looking again immediately could keep the other one out.
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_LE(took, absl::Milliseconds(5));
  board.Publish(Generation(1), absl::Now());
  for (std::thread& thread : waiting) thread.join();
}

}  // namespace
}  // namespace ringattn::server

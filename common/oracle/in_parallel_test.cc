#include "common/oracle/in_parallel.h"

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::oracle {
namespace {

TEST(InParallel, CallsEachOnce) {
  for (const int64_t count : {0, 1, 2, 3, 1000}) {
    for (const double cost : {0.0, 1.0, 1e9}) {
      std::vector<std::atomic<int>> calls(count);
      InParallel(count, cost, [&](int64_t i) { ++calls[i]; });
      for (const auto& times : calls) EXPECT_EQ(times, 1);
    }
  }
}

TEST(InParallel, LittleWorkStaysOnTheCallersThread) {
  std::set<std::thread::id> threads;
  InParallel(1000, 1.0, [&](int64_t) { threads.insert(std::this_thread::get_id()); });
  EXPECT_EQ(threads, std::set<std::thread::id>{std::this_thread::get_id()});
}

TEST(InParallel, MuchWorkIsSharedAmongProcessors) {
  const auto processors = static_cast<int64_t>(std::thread::hardware_concurrency());
  if (processors < 2) GTEST_SKIP() << "one processor";
  // Each waits for the other: on one thread this would never end.
  std::atomic<int64_t> arrived{0};
  InParallel(2, 1e9, [&](int64_t) {
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
}

}  // namespace
}  // namespace ringattn::oracle

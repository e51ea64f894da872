#include "worker/kernels/cpu/workspace/thread_pool.h"

#include <atomic>
#include <memory>
#include <thread>

#include "gtest/gtest.h"

namespace ringattn::worker::cpu {
namespace {

TEST(ThreadPoolTest, RunsEveryTaskOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t tasks : {0, 1, 2, 3, 1000}) {
      const auto counts = std::make_unique<std::atomic<int>[]>(tasks + 1);
      pool.ParallelFor(tasks, [&](int thread, int64_t task) {
        EXPECT_GE(thread, 0);
        EXPECT_LT(thread, threads);
        counts[task].fetch_add(1);
      });
      for (int64_t t = 0; t < tasks; ++t) EXPECT_EQ(counts[t], 1);
    }
  }
}

// Each task waits for the one before it: ends only if lower tasks start first.
TEST(ThreadPoolTest, ATaskMayWaitForLowerOnes) {
  ThreadPool pool(4);
  constexpr int64_t kTasks = 500;
  std::atomic<int64_t> done{0};
  pool.ParallelFor(kTasks, [&](int, int64_t task) {
    while (done.load() != task) std::this_thread::yield();
    done.fetch_add(1);
  });
  EXPECT_EQ(done, kTasks);
}

}  // namespace
}  // namespace ringattn::worker::cpu

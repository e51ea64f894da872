#include "worker/kernels/cpu/workspace/pause.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "gtest/gtest.h"

namespace ringattn::worker::cpu {
namespace {

using std::chrono::milliseconds;

TEST(Pause, NoPauseDoesNotBlock) {
  Pause pause;
  pause.Await();
  pause.Begin(std::chrono::hours(1));
  pause.End();
  pause.Await();
}

TEST(Pause, HoldsUntilItsEnd) {
  Pause pause;
  std::atomic<bool> passed{false};
  pause.Begin(std::chrono::hours(1));
  std::thread thread([&] {
    pause.Await();
    passed = true;
  });
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(passed);
  pause.End();
  thread.join();
}

// A new pause has a new limit, although a thread still waits for the last one.
TEST(Pause, EndsAfterTheLimit) {
  Pause pause;
  const auto begin = std::chrono::steady_clock::now();
  pause.Begin(milliseconds(1));
  std::thread thread([&] { pause.Await(); });
  pause.End();
  pause.Begin(milliseconds(30));
  pause.Await();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(30));
  thread.join();
}

}  // namespace
}  // namespace ringattn::worker::cpu

#include "common/wire/grpc_1_51/callback_threads.h"

#include <grpc/support/cpu.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/wire/grpc_1_51/keep_awake.h"
#include "gtest/gtest.h"

namespace ringattn::wire {
namespace {

int ThreadsNamed(const std::string& name) {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");
    std::string comm;
    std::getline(file, comm);
    if (comm == name) ++count;
  }
  return count;
}

// gRPC's own libraries use the override. 5 is the number of no machine: it has 10 processors.
TEST(CallbackThreadsTest, GrpcStartsAsManyThreadsAsSet) {
  SetCallbackThreads(5);
  EXPECT_EQ(gpr_cpu_num_cores(), 10);
  EXPECT_LT(gpr_cpu_current_cpu(), 10);
  const KeepAwake user_of_callbacks;
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (ThreadsNamed("nexting_thread") < 5 && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(ThreadsNamed("nexting_thread"), 5);
}

TEST(CallbackThreadsTest, LargeMachinesHaveAQuarterOfTheirProcessors) {
  const int expected[][2] = {{1, 2}, {2, 2}, {4, 2}, {6, 3}, {8, 4}, {16, 4}, {32, 8}, {128, 16}};
  for (const auto& [processors, threads] : expected) {
    EXPECT_EQ(DefaultCallbackThreads(processors), threads) << processors;
  }
}

TEST(CallbackThreadsTest, OneServesOnSmallMachines) {
  EXPECT_EQ(ServingCallbackThreads(1), 1);
  EXPECT_EQ(ServingCallbackThreads(2), 1);
  EXPECT_EQ(ServingCallbackThreads(3), 2);
  EXPECT_EQ(ServingCallbackThreads(16), 2);
}

}  // namespace
}  // namespace ringattn::wire

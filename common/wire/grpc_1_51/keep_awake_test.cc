#include "common/wire/grpc_1_51/keep_awake.h"

#include <algorithm>
#include <list>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <grpcpp/generic/generic_stub.h>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/wire/grpc_1_51/callback_call.h"
#include "gtest/gtest.h"

namespace ringattn::wire {
namespace {

// Returns the time that `count` concurrent calls take, which need only gRPC's callbacks.
absl::Duration TimeOfCalls(grpc::GenericStub& stub, int count) {
  std::list<CallbackCall> calls;
  absl::BlockingCounter left(count);
  const absl::Time start = absl::Now();
  for (int i = 0; i < count; ++i) calls.emplace_back(stub, [&] { left.DecrementCount(); });
  left.Wait();
  return absl::Now() - start;
}

// The pause is gRPC's: after a second without an event its threads sleep for 100 ms. Without a
// KeepAwake these calls take 50 ms.
TEST(KeepAwakeTest, CallAfterPauseIsAnsweredAtOnce) {
  const KeepAwake awake;
  const KeepAwake second;
  grpc::GenericStub stub(UnconnectedChannel());
  std::vector<absl::Duration> times, prompt;
  for (int i = 0; i < 5; ++i) {
    // Many, so that every thread gets an event and all seconds start together.
    TimeOfCalls(stub, 200);
    prompt.push_back(TimeOfCalls(stub, 1));
    absl::SleepFor(absl::Milliseconds(1050));
    times.push_back(TimeOfCalls(stub, 1));
  }
  std::sort(times.begin(), times.end());
  std::sort(prompt.begin(), prompt.end());
  // A busy machine may delay one or two calls, and a slow one all of them.
  EXPECT_LT(times[2], prompt[2] + absl::Milliseconds(20));
}

TEST(KeepAwakeTest, StopsAndStartsAgain) {
  for (int i = 0; i < 20; ++i) {
    const KeepAwake awake;
  }
}

// An instance that ends while another begins does not wait for the other's end.
TEST(KeepAwakeTest, StopsWhileAnotherStarts) {
  for (int round = 0; round < 200; ++round) {
    auto first = std::make_unique<KeepAwake>();
    absl::SleepFor(absl::Microseconds(10 * round));
    absl::Notification ended;
    std::thread ending([&] {
      first.reset();
      ended.Notify();
    });
    std::optional<KeepAwake> second(std::in_place);
    const bool in_time = ended.WaitForNotificationWithTimeout(absl::Seconds(10));
    second.reset();
    ending.join();
    ASSERT_TRUE(in_time) << "round " << round;
  }
}

}  // namespace
}  // namespace ringattn::wire

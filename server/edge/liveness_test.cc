#include "server/edge/liveness.h"

#include <atomic>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

constexpr LivenessOptions kFast = {.interval = absl::Milliseconds(1),
                                   .probe_timeout = absl::Milliseconds(1),
                                   .unhealthy_after = absl::Milliseconds(20),
                                   .dead_after = absl::Milliseconds(100)};

TEST(LivenessTest, FailuresMakeItUnhealthyAndThenDead) {
  std::vector<std::string> said;  // used by the liveness thread until `dead`
  absl::Notification dead;
  {
    const Liveness liveness(
        kFast, {.probe = [](absl::Duration) { return absl::UnavailableError("closed"); },
                .on_change = [&](const absl::Status& why) { said.push_back(why.ToString()); },
                .on_dead =
                    [&](const absl::Status&) {
                      said.push_back("dead");
                      dead.Notify();
                    }});
    ASSERT_TRUE(dead.WaitForNotificationWithTimeout(absl::Seconds(10)));
  }
  EXPECT_EQ(said, (std::vector<std::string>{"UNAVAILABLE: closed", "dead"}));
}

TEST(LivenessTest, ASuccessStartsOver) {
  std::atomic<int> probes = 0;
  std::vector<bool> said;
  absl::Notification again;
  LivenessOptions options = kFast;
  options.dead_after = absl::Seconds(10);  // it may be reported unhealthy late
  {
    const Liveness liveness(
        options, {.probe =
                      [&](absl::Duration) {
                        // Fails until it has been reported unhealthy.
                        ++probes;
                        return said.empty() ? absl::DeadlineExceededError("") : absl::OkStatus();
                      },
                  .on_change =
                      [&](const absl::Status& why) {
                        said.push_back(why.ok());
                        if (why.ok()) again.Notify();
                      },
                  .on_dead = [](const absl::Status&) { ADD_FAILURE() << "dead"; }});
    ASSERT_TRUE(again.WaitForNotificationWithTimeout(absl::Seconds(10)));
  }
  EXPECT_EQ(said, (std::vector<bool>{false, true}));
  EXPECT_GE(probes, 2);
}

}  // namespace
}  // namespace ringattn::server

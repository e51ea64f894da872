#include "worker/comm/nccl/settle_pause.h"

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(SettlePause, NoPauseSoonAfterLaunch) {
  EXPECT_EQ(SettlePause(absl::Microseconds(100)), absl::ZeroDuration());
  EXPECT_LE(SettlePause(absl::Microseconds(400)), absl::Microseconds(50));
  EXPECT_GT(SettlePause(absl::Microseconds(400)), absl::ZeroDuration());
}

TEST(SettlePause, LongWaitSleepsLonger) {
  EXPECT_EQ(SettlePause(absl::Seconds(1)), absl::Milliseconds(1));
}

}  // namespace
}  // namespace ringattn::worker

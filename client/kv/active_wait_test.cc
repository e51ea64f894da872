#include "client/kv/active_wait.h"

#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

TEST(ActiveWait, LastsForTwiceTheLastDeviceTime) {
  ActiveWait wait;
  wait.SetSpin(absl::Microseconds(200));
  EXPECT_EQ(wait.duration(), absl::Microseconds(200));
  wait.NoteDeviceTime(absl::Microseconds(40));
  EXPECT_EQ(wait.duration(), absl::Microseconds(200));
  wait.NoteDeviceTime(absl::Milliseconds(1));
  EXPECT_EQ(wait.duration(), absl::Milliseconds(2));
  wait.NoteDeviceTime(absl::Seconds(1));
  EXPECT_EQ(wait.duration(), ActiveWait::kMost);
  wait.NoteDeviceTime(absl::ZeroDuration());
  EXPECT_EQ(wait.duration(), absl::Microseconds(200));
}

// Without spare cores, the worker needs the writer's.
TEST(ActiveWait, IsZeroWithoutASpin) {
  ActiveWait wait;
  wait.SetSpin(absl::ZeroDuration());
  wait.NoteDeviceTime(absl::Milliseconds(1));
  EXPECT_EQ(wait.duration(), absl::ZeroDuration());
}

}  // namespace
}  // namespace ringattn::client

#include "worker/comm/cuda/step_deadlines.h"

#include <memory>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kTimeout = absl::Seconds(10);

absl::Time At(int seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

std::shared_ptr<HostEvent> NewEvent() { return std::make_shared<HostEvent>(); }

TEST(StepDeadlines, GroupExpiresAfterTimeoutByName) {
  StepDeadlines steps(kTimeout);
  EXPECT_THAT(steps.Poll(At(0)), IsEmpty());
  steps.Add({}, NewEvent(), "receiving from rank 2");
  EXPECT_THAT(steps.Poll(At(100)), IsEmpty());
  EXPECT_THAT(steps.Poll(At(110)), IsEmpty());
  EXPECT_EQ(steps.Poll(At(111)), "receiving from rank 2 took longer than 10s");
}

TEST(StepDeadlines, WaitingForComputeDoesNotCount) {
  StepDeadlines steps(kTimeout);
  auto a = NewEvent(), b = NewEvent();
  steps.Add({a, b}, NewEvent(), "exchange");
  EXPECT_THAT(steps.Poll(At(0)), IsEmpty());
  b->Finish(absl::OkStatus());
  EXPECT_THAT(steps.Poll(At(50)), IsEmpty());
  // A failed dependency counts as done.
  a->Finish(absl::InternalError("kernel"));
  EXPECT_THAT(steps.Poll(At(60)), IsEmpty());
  EXPECT_THAT(steps.Poll(At(70)), IsEmpty());
  EXPECT_THAT(steps.Poll(At(71)), HasSubstr("took longer"));
}

TEST(StepDeadlines, TimeOfEarlierGroupsDoesNotCount) {
  StepDeadlines steps(kTimeout);
  auto first = NewEvent(), second = NewEvent();
  steps.Add({}, first, "first");
  steps.Add({}, second, "second");
  EXPECT_THAT(steps.Poll(At(0)), IsEmpty());
  first->Finish(absl::OkStatus());
  EXPECT_THAT(steps.Poll(At(9)), IsEmpty());
  EXPECT_THAT(steps.Poll(At(19)), IsEmpty());
  EXPECT_EQ(steps.Poll(At(20)), "second took longer than 10s");
}

TEST(StepDeadlines, EndedGroupsAreRemoved) {
  StepDeadlines steps(kTimeout);
  auto first = NewEvent(), second = NewEvent();
  steps.Add({}, first, "first");
  steps.Add({}, second, "second");
  first->Finish(absl::OkStatus());
  second->Finish(absl::UnavailableError("peer"));
  EXPECT_FALSE(steps.empty());
  EXPECT_THAT(steps.Poll(At(1000)), IsEmpty());
  EXPECT_TRUE(steps.empty());
  EXPECT_EQ(first.use_count(), 1);
}

TEST(DescribeGroup, NamesEachPeerOnce) {
  EXPECT_EQ(DescribeGroup({}), "no transfer");
  EXPECT_EQ(DescribeGroup({{Kind::kSend, 1, nullptr, 4},
                           {Kind::kSend, 1, nullptr, 8},
                           {Kind::kReceive, 3, nullptr, 4}}),
            "sending to rank 1, receiving from rank 3");
}

}  // namespace
}  // namespace ringattn::worker

#include "worker/comm/inproc/inproc_communicator.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

absl::Time Soon() { return absl::Now() + absl::Seconds(10); }

TEST(InProcessRing, PassesBlocksAroundTheRing) {
  for (int world_size : {2, 3, 5, 8}) {
    auto ring = MakeInProcessRing(world_size);
    std::vector<RunControl> controls(world_size);
    std::vector<std::vector<int>> now(world_size), next(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      now[rank].assign(1000, rank);
      next[rank].assign(1000, -1);
    }
    for (int step = 1; step < world_size; ++step) {
      std::vector<EventRef> done;
      for (int rank = 0; rank < world_size; ++rank) {
        done.push_back(ring[rank]->Start(
            {{Kind::kSend, (rank + 1) % world_size, now[rank].data(), 4000},
             {Kind::kReceive, (rank + world_size - 1) % world_size, next[rank].data(), 4000}},
            {}, &controls[rank]));
      }
      for (const EventRef& event : done) ASSERT_TRUE(event->Wait(Soon()).ok());
      std::swap(now, next);
      for (int rank = 0; rank < world_size; ++rank) {
        EXPECT_EQ(now[rank][999], (rank + world_size - step) % world_size);
        EXPECT_EQ(controls[rank].progress.load(), 2 * step);
      }
    }
  }
}

TEST(InProcessRing, SizesMustAgree) {
  auto ring = MakeInProcessRing(2);
  RunControl control;
  int a = 0;
  int64_t b = 0;
  EventRef send = ring[0]->Start({{Kind::kSend, 1, &a, 4}}, {}, &control);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, &b, 8}}, {}, &control);
  EXPECT_EQ(receive->Wait(Soon()).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(send->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
}

TEST(InProcessRing, AbortEndsWaitingGroupsAndLaterOnes) {
  auto ring = MakeInProcessRing(2);
  RunControl control;
  int a = 0;
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, &a, 4}}, {}, &control);
  EventRef send = ring[1]->Start({{Kind::kSend, 0, &a, 4}}, {}, &control);
  ring[0]->Abort("rank 0 was lost");
  EXPECT_THAT(receive->Wait(Soon()).message(), testing::HasSubstr("rank 0 was lost"));
  EXPECT_EQ(send->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
}

TEST(InProcessRing, AGroupRunsThoughItsPredecessorFailed) {
  auto ring = MakeInProcessRing(2);
  RunControl control;
  auto failed = std::make_shared<HostEvent>();
  failed->Finish(absl::InternalError("kernel"));
  int a = 7, b = 0;
  EventRef send = ring[0]->Start({{Kind::kSend, 1, &a, 4}}, {failed}, &control);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, &b, 4}}, {}, &control);
  EXPECT_TRUE(receive->Wait(Soon()).ok());
  EXPECT_TRUE(send->Wait(Soon()).ok());
  EXPECT_EQ(b, 7);
}

}  // namespace
}  // namespace ringattn::worker

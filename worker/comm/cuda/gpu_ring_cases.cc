// Additional cases for rings of GPUs, independent of what moves the bytes. Needs GPUs or fakes of
// them; `--gtest_filter` selects cases.
#include <cstdio>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/cuda/gpu_ranks.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;
using ::testing::AnyOf;

class GpuRingTest : public RingOfManyTest {};

INSTANTIATE_TEST_SUITE_P(Rings, GpuRingTest, ::testing::ValuesIn(RingsUnderTest()), RingName);

TEST_P(GpuRingTest, UnmatchedSendToItselfFailsAtOnce) {
  Ranks ranks = MakeRanks(1);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  Memory a(ranks[0], 1000);
  EventRef half = ring[0]->Start({{Kind::kSend, 0, a.data(), 1000}}, {}, &control);
  EXPECT_EQ(half->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
}

TEST_P(GpuRingTest, RejectsTwoEqualBlobs) {
  Ranks ranks = MakeRanks(2);
  std::vector<std::string> blobs = ranks.Prepare(3);
  blobs[1] = blobs[0];
  EXPECT_THAT(ranks.transport(1).Connect(3, blobs, Soon()).status().code(),
              AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kFailedPrecondition));
}

// A group on a failed ring fails without being enqueued.
TEST_P(GpuRingTest, GroupAfterAbortFailsAtOnce) {
  Ranks ranks = MakeRanks(2);
  Ring ring = ranks.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  Memory a(ranks[0], 4);
  ring[0]->Abort("torn down");
  EventRef later = ring[0]->Start({{Kind::kSend, 1, a.data(), 4}}, {}, &control);
  EXPECT_TRUE(later->Done());
}

// Measures the rate for each number of CTAs, if the transport uses any.
TEST_P(GpuRingTest, Rate) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const int world_size = GetParam().max_world_size;
  for (int max_ctas : TestCtas()) {
    Ranks ranks = MakeRanks(world_size, absl::Minutes(1), max_ctas);
    std::vector<MemoryRef> sent, received;
    for (int rank = 0; rank < world_size; ++rank) {
      sent.push_back(std::make_unique<Memory>(ranks[rank], kBytes));
      received.push_back(std::make_unique<Memory>(ranks[rank], kBytes));
    }
    Ring ring = ranks.Form(1);
    ASSERT_TRUE(Formed(ring));
    std::vector<RunControl> controls(world_size);
    absl::Duration best = absl::InfiniteDuration();
    for (int round = 0; round < 3; ++round) {
      std::vector<EventRef> done;
      for (int rank = 0; rank < world_size; ++rank) {
        const int right = (rank + 1) % world_size, left = (rank + world_size - 1) % world_size;
        done.push_back(ring[rank]->Start({{Kind::kSend, right, sent[rank]->data(), kBytes},
                                          {Kind::kReceive, left, received[rank]->data(), kBytes}},
                                         {}, &controls[rank]));
      }
      absl::Duration slowest = absl::ZeroDuration();
      for (const EventRef& event : done) {
        ASSERT_TRUE(event->Wait(Soon()).ok());
        slowest = std::max(slowest, event->end_time() - event->begin_time());
      }
      best = std::min(best, slowest);
    }
    std::printf("%d CTAs, ring of %d: 256 MiB each way in %.2f ms, %.0f GB/s per GPU and way\n",
                max_ctas, world_size, absl::ToDoubleMilliseconds(best),
                kBytes / absl::ToDoubleSeconds(best) / 1e9);
  }
}

}  // namespace
}  // namespace ringattn::worker

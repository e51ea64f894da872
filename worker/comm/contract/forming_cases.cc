// The contract of RingTransport while a ring forms: the two phases, cancellation and errors.
#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_fixture.h"

namespace ringattn::worker {
namespace {

using ::testing::AnyOf;

class FormingContract : public RingTest {
 protected:
  void SetUp() override {
    if (GetParam().max_world_size < 1) GTEST_SKIP() << "needs a device";
  }
  int world_size() const { return LargestWorld(2); }
};
class FormingOfManyContract : public RingOfManyTest {};

INSTANTIATE_TEST_SUITE_P(Rings, FormingContract, ::testing::ValuesIn(RingsUnderTest()), RingName);
INSTANTIATE_TEST_SUITE_P(Rings, FormingOfManyContract, ::testing::ValuesIn(RingsOfMany()),
                         RingName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FormingOfManyContract);

TEST_P(FormingContract, RankMustBeWithinRing) {
  Ranks ranks = MakeRanks(world_size());
  for (const auto& [rank, size] :
       {std::pair(1, 1), std::pair(2, 2), std::pair(-1, 1), std::pair(0, 0)}) {
    EXPECT_EQ(ranks.transport(0).Prepare(5, rank, size).status().code(),
              absl::StatusCode::kInvalidArgument)
        << rank << " of " << size;
  }
}

TEST_P(FormingContract, OnlyTheLastPreparedGenerationConnects) {
  Ranks ranks = MakeRanks(world_size());
  const auto code = [&](uint64_t generation, const std::vector<std::string>& blobs) {
    return ranks.transport(0).Connect(generation, blobs, Soon()).status().code();
  };
  const std::vector<std::string> old = ranks.Prepare(3), blobs = ranks.Prepare(4);
  EXPECT_EQ(code(3, old), absl::StatusCode::kCancelled);
  EXPECT_EQ(code(5, blobs), absl::StatusCode::kCancelled);
  ranks.transport(0).Cancel();
  EXPECT_EQ(code(4, blobs), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Formed(ranks.Form(6)));
}

TEST_P(FormingContract, RequiresOneBlobPerRank) {
  Ranks ranks = MakeRanks(world_size());
  std::vector<std::string> blobs = ranks.Prepare(3);
  const auto code = [&](const std::vector<std::string>& given) {
    return ranks.transport(0).Connect(3, given, Soon()).status().code();
  };
  EXPECT_EQ(code({}), absl::StatusCode::kInvalidArgument);
  blobs = ranks.Prepare(3);
  blobs.push_back(blobs[0]);
  EXPECT_EQ(code(blobs), absl::StatusCode::kInvalidArgument);
}

TEST_P(FormingOfManyContract, ChecksBlobs) {
  Ranks ranks = MakeRanks(2);
  const auto code = [&](const std::string& bad) {
    std::vector<std::string> blobs = ranks.Prepare(3);
    blobs[0] = bad;
    return ranks.transport(1).Connect(3, blobs, Soon()).status().code();
  };
  for (const char* bad : {"\x01", "\xff\xffxx", "nonsense"}) {
    EXPECT_EQ(code(bad), absl::StatusCode::kInvalidArgument) << bad;
  }
  // An empty blob may mark a rank that cannot take part.
  EXPECT_THAT(code(""),
              AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kFailedPrecondition));
}

TEST_P(FormingOfManyContract, MissingPeerIsUnavailableByDeadline) {
  const absl::Duration patience = absl::Seconds(1);
  Ranks ranks = MakeRanks(2);
  uint64_t generation = 0;
  // The peer is gone, or silent.
  for (const bool gone : {true, false}) {
    if (!gone && GetParam().reaches_prepared_ranks) continue;
    const std::vector<std::string> blobs = ranks.Prepare(++generation);
    if (gone) ranks.transport(0).Cancel();
    const absl::Time begin = absl::Now();
    auto communicator = ranks.transport(1).Connect(generation, blobs, begin + patience);
    EXPECT_EQ(communicator.status().code(), absl::StatusCode::kUnavailable)
        << communicator.status();
    EXPECT_LT(absl::Now() - begin, patience + kAbortBound);
  }
  EXPECT_TRUE(Formed(ranks.Form(++generation)));
}

TEST_P(FormingOfManyContract, CancelEndsConnect) {
  Ranks ranks = MakeRanks(2);
  for (int rank : {0, 1}) {
    const std::vector<std::string> blobs = ranks.Prepare(1 + rank);
    // Connect must not succeed before it is cancelled. It may notice that the peer is gone.
    const bool peer_gone = GetParam().reaches_prepared_ranks;
    if (peer_gone) ranks.transport(1 - rank).Cancel();
    std::atomic<bool> connecting{false};
    std::thread canceller([&] {
      while (!connecting.load()) std::this_thread::yield();
      ranks.transport(rank).Cancel();
    });
    const absl::Time begin = absl::Now();
    connecting = true;
    const absl::Status status = ranks.transport(rank).Connect(1 + rank, blobs, Soon()).status();
    canceller.join();
    EXPECT_TRUE(absl::IsCancelled(status) || (peer_gone && absl::IsUnavailable(status))) << status;
    EXPECT_LT(absl::Now() - begin, kAbortBound);
  }
  EXPECT_TRUE(Formed(ranks.Form(9)));
}

}  // namespace
}  // namespace ringattn::worker

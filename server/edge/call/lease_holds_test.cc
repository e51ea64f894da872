#include "server/edge/call/lease_holds.h"

#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class FakeStream : public LeaseHolds::Stream {
 public:
  void OnClosed() override { ++closed; }
  int closed = 0;
};

Caller Of(const std::string& name, const std::string& connection = "ipv4:10.0.0.1:1") {
  Caller caller;
  caller.principal = name;
  caller.connection = connection;
  caller.client = name.empty() ? connection : name;
  return caller;
}

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

constexpr absl::Duration kRetry = absl::Seconds(1);

bool All(const std::string&, const std::string&) { return true; }

TEST(LeaseHolds, RenewsHeldLeasesByPrincipalEveryThirdOfTheTtl) {
  const Limits limits;
  LeaseHolds holds(limits, "HoldResiduals");
  FakeStream one, two, three;
  ASSERT_FALSE(holds.Enter(&one, Of("a"), kRetry));
  ASSERT_FALSE(holds.Enter(&two, Of("a"), kRetry));
  ASSERT_FALSE(holds.Enter(&three, Of("b"), kRetry));
  holds.Hold(&one, {"r1", "r2"});
  holds.Hold(&two, {"r2", "r3"});
  holds.Hold(&three, {"r4"});
  const std::vector<Renewal> due = holds.Due(At(100), All);
  ASSERT_EQ(due.size(), 2u);
  EXPECT_EQ(due[0].principal, "a");
  EXPECT_THAT(due[0].ids, ElementsAre("r1", "r2", "r3"));
  EXPECT_EQ(due[0].ttl, limits.residual_hold_ttl);
  EXPECT_EQ(due[1].principal, "b");
  EXPECT_THAT(due[1].ids, ElementsAre("r4"));
  EXPECT_THAT(holds.Due(At(119.9), All), IsEmpty());
  EXPECT_EQ(holds.Due(At(120), All).size(), 2u);
}

TEST(LeaseHolds, ForgetsEndedAndReleasedLeases) {
  LeaseHolds holds{Limits(), "HoldResiduals"};
  FakeStream stream;
  ASSERT_FALSE(holds.Enter(&stream, Of("a"), kRetry));
  holds.Hold(&stream, {"r1", "r2", "r3"});
  holds.Release(&stream, {"r2", "never"});
  const auto due = holds.Due(At(100), [](const std::string& id, const std::string& principal) {
    EXPECT_EQ(principal, "a");
    return id != "r1";
  });
  ASSERT_EQ(due.size(), 1u);
  EXPECT_THAT(due[0].ids, ElementsAre("r3"));
  EXPECT_THAT(holds.Leave(&stream)->ids, ElementsAre("r3"));
}

TEST(LeaseHolds, AStreamsEndShortensOnlyLeasesThatNoOtherHolds) {
  const Limits limits;
  LeaseHolds holds(limits, "HoldResiduals");
  FakeStream old_one, new_one, foreign;
  ASSERT_FALSE(holds.Enter(&old_one, Of("a"), kRetry));
  ASSERT_FALSE(holds.Enter(&new_one, Of("a"), kRetry));
  ASSERT_FALSE(holds.Enter(&foreign, Of("b"), kRetry));
  holds.Hold(&old_one, {"r1", "r2"});
  holds.Hold(&new_one, {"r1"});
  holds.Hold(&foreign, {"r2"});
  const auto left = holds.Leave(&old_one);
  ASSERT_TRUE(left.has_value());
  EXPECT_THAT(left->ids, ElementsAre("r2"));
  EXPECT_EQ(left->principal, "a");
  EXPECT_EQ(left->ttl, limits.residual_hold_grace);
  EXPECT_FALSE(holds.Leave(&old_one).has_value());
  EXPECT_EQ(holds.streams(), 2);
}

TEST(LeaseHolds, StreamsAreBounded) {
  Limits limits;
  limits.max_residual_holds = 3;
  limits.max_residual_holds_per_client = 2;
  LeaseHolds holds(limits, "HoldResiduals");
  std::vector<FakeStream> streams(6);
  ASSERT_FALSE(holds.Enter(&streams[0], Of("", "ipv4:1.2.3.4:5"), kRetry));
  ASSERT_FALSE(holds.Enter(&streams[1], Of("", "ipv4:1.2.3.4:5"), kRetry));
  const auto of_client = holds.Enter(&streams[2], Of("", "ipv4:1.2.3.4:5"), kRetry);
  ASSERT_TRUE(of_client.has_value());
  EXPECT_EQ(of_client->code, absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(of_client->reason, "TOO_MANY_HOLDS");
  ASSERT_FALSE(holds.Enter(&streams[3], Of("a"), kRetry));
  EXPECT_TRUE(holds.Enter(&streams[4], Of("b"), kRetry).has_value());
  // A rejected stream holds nothing; a freed slot can be used by another stream.
  EXPECT_FALSE(holds.Leave(&streams[4]).has_value());
  EXPECT_TRUE(holds.Leave(&streams[0]).has_value());
  EXPECT_FALSE(holds.Enter(&streams[5], Of("b"), kRetry));
}

TEST(LeaseHolds, CloseEndsCurrentAndFutureStreams) {
  LeaseHolds holds{Limits(), "HoldResiduals"};
  FakeStream stream, late;
  ASSERT_FALSE(holds.Enter(&stream, Of("a"), kRetry));
  holds.Close();
  EXPECT_EQ(stream.closed, 1);
  EXPECT_EQ(holds.Enter(&late, Of("a"), kRetry)->code, absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ringattn::server

// Tests of Residuals without requests and operations.
#include "server/core/requests/residuals.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class ResidualsTest : public testing::Test {
 protected:
  ResidualsTest() {
    config_.limits.max_residual_bytes = 1000;
    batch_.Begin(now_);
  }

  static Residual Of(const std::string& handle, int64_t bytes, const std::string& client = "") {
    Residual residual;
    residual.handle = handle;
    residual.principal = residual.client = client;
    residual.operation_id = absl::StrCat("op-", handle);
    residual.spec = std::make_shared<const AttentionSpec>();
    residual.plan = std::make_shared<const Plan>();
    residual.members = {{1, bytes / 2}, {2, bytes - bytes / 2}};
    residual.ttl = absl::Seconds(10);
    return residual;
  }
  std::string Keep(const std::string& handle, int64_t bytes, const std::string& client = "",
                   std::optional<int64_t> limit = std::nullopt) {
    return residuals_.Keep(Of(handle, bytes, client), limit, in_use_);
  }
  std::string ReasonOf(const std::string& handle, const std::string& request = "") {
    const std::optional<Failure> why = residuals_.CheckReadable(handle, "", request);
    return why ? why->reason : "";
  }
  void Pass(absl::Duration time) {
    now_ += time;
    batch_.Begin(now_);
    residuals_.CheckTimers(in_use_);
  }
  // Returns the drops sent since the last call, as "connection operation".
  std::vector<std::string> Dropped() {
    std::vector<std::string> dropped;
    for (const Action& action : batch_.Take()) {
      const auto& send = std::get<SendToWorker>(action);
      for (const std::string& id : send.message.drop_residuals().operation_ids()) {
        dropped.push_back(absl::StrCat(send.connection, " ", id));
      }
    }
    return dropped;
  }

  CoordinatorConfig config_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  ActionBatch batch_;
  Residuals residuals_{&config_, &batch_};
  Residuals::InUse in_use_;
};

TEST_F(ResidualsTest, CountsBytesByWorker) {
  EXPECT_EQ(Keep("a", 101), "");
  EXPECT_EQ(Keep("b", 10), "");
  EXPECT_EQ(residuals_.bytes_by_worker().at(1), 55);
  EXPECT_EQ(residuals_.bytes_by_worker().at(2), 56);
  EXPECT_EQ(residuals_.counts().bytes, 111);
  EXPECT_THAT(residuals_.OnWorkerLost(1), IsEmpty());
  EXPECT_THAT(Dropped(), ElementsAre("2 op-a", "2 op-b"));  // the third worker is lost
  EXPECT_THAT(residuals_.bytes_by_worker(), IsEmpty());
  EXPECT_EQ(ReasonOf("a"), "RESIDUAL_LOST");
  EXPECT_EQ(ReasonOf("c"), "RESIDUAL_NOT_FOUND");
}

TEST_F(ResidualsTest, ConsumedResidualsMakeRoomAndOthersDoNot) {
  EXPECT_EQ(Keep("a", 400), "");
  EXPECT_EQ(Keep("b", 400), "");
  EXPECT_THAT(Keep("c", 400), HasSubstr("800 of max_residual_bytes 1000"));
  residuals_.Read("b", "request", /*keep=*/false);
  residuals_.Read("a", "request", /*keep=*/true);
  EXPECT_EQ(Keep("c", 400), "");
  EXPECT_THAT(Dropped(), ElementsAre("1 op-b", "2 op-b"));
  EXPECT_EQ(ReasonOf("b", "request"), "RESIDUAL_CONSUMED");  // for a retry as well
  residuals_.Read("a", "request", /*keep=*/false);
  residuals_.Attach("a", 7);  // a retry that has arrived
  EXPECT_THAT(Keep("d", 400), HasSubstr("800 of"));
  residuals_.Detach("a", 7);
  in_use_ = {"a"};
  EXPECT_THAT(Keep("d", 400), HasSubstr("800 of"));
  in_use_ = {};
  EXPECT_EQ(Keep("d", 400), "");
  EXPECT_EQ(residuals_.counts().refused, 3);
}

TEST_F(ResidualsTest, ClientsHaveSeparateQuotas) {
  EXPECT_EQ(Keep("a", 100, "alice", 150), "");
  EXPECT_THAT(Keep("b", 100, "alice", 150), HasSubstr("this client's residuals take 100"));
  EXPECT_EQ(Keep("b", 100, "bob", 150), "");
}

TEST_F(ResidualsTest, TheNumberOfResidualsIsBounded) {
  config_.limits.max_residuals = 2;
  EXPECT_EQ(Keep("a", 1), "");
  EXPECT_EQ(Keep("b", 1), "");
  EXPECT_THAT(Keep("c", 1), HasSubstr("room for no more"));
  config_.limits.max_residuals = 100;
  config_.limits.max_residual_record_bytes = 2;
  EXPECT_THAT(Keep("c", 1), HasSubstr("room for no more"));
}

// A hold stream's end drops all its residuals in one batch; a worker whose control stream has 4,096
// unread messages is dropped.
TEST_F(ResidualsTest, ResidualsDroppedTogetherShareAMessage) {
  config_.limits.max_residual_bytes = int64_t{1} << 40;
  for (int i = 0; i < 5000; ++i) ASSERT_EQ(Keep(absl::StrCat(i), 10), "");
  Pass(absl::Seconds(11));
  EXPECT_EQ(residuals_.counts().residuals, 0);
  const std::vector<Action> actions = batch_.Take();
  ASSERT_EQ(actions.size(), 2u);
  for (const Action& action : actions) {
    EXPECT_EQ(std::get<SendToWorker>(action).message.drop_residuals().operation_ids_size(), 5000);
  }
}

// A residual that is kept by an intermediate message must exist before its drop.
TEST_F(ResidualsTest, DropsStayInOrderWithOtherMessages) {
  Keep("a", 10);
  Keep("b", 10);
  residuals_.Evict("a");
  batch_.Send(1)->mutable_release()->set_operation_id("op-b");
  residuals_.Evict("b");
  EXPECT_THAT(Dropped(), ElementsAre("1 op-a", "2 op-a", "2 op-b", "1 op-b"));
}

TEST_F(ResidualsTest, EndedResidualsAreRememberedForAWhile) {
  config_.limits.ended_residuals_kept = 2;
  for (const char* handle : {"a", "b", "c"}) {
    Keep(handle, 1);
    residuals_.Delete(handle, "", in_use_);
  }
  EXPECT_EQ(ReasonOf("a"), "RESIDUAL_NOT_FOUND");
  EXPECT_EQ(ReasonOf("b"), "RESIDUAL_CONSUMED");
  EXPECT_EQ(ReasonOf("c"), "RESIDUAL_CONSUMED");
}

TEST_F(ResidualsTest, AResidualInUseDoesNotExpire) {
  Keep("a", 1);
  Keep("b", 1);
  Keep("c", 1);
  residuals_.Attach("a", 7);
  in_use_ = {"b"};
  Pass(absl::Seconds(11));
  EXPECT_EQ(ReasonOf("a"), "");
  EXPECT_EQ(ReasonOf("b"), "");
  EXPECT_EQ(ReasonOf("c"), "RESIDUAL_EXPIRED");
  residuals_.Detach("a", 7);
  in_use_ = {};
  Pass(absl::Milliseconds(50));
  EXPECT_EQ(ReasonOf("a"), "RESIDUAL_EXPIRED");
  EXPECT_EQ(ReasonOf("b"), "RESIDUAL_EXPIRED");
}

TEST_F(ResidualsTest, OnlyTheSameRequestMayReadAgainAndNotForLong) {
  Keep("a", 1);
  residuals_.Read("a", "request", /*keep=*/false);
  EXPECT_EQ(ReasonOf("a", "request"), "");
  EXPECT_EQ(ReasonOf("a", "other"), "RESIDUAL_CONSUMED");
  EXPECT_EQ(ReasonOf("a", ""), "RESIDUAL_CONSUMED");
  Pass(config_.residual_replay_time);
  EXPECT_EQ(ReasonOf("a", "request"), "");
  Pass(absl::Seconds(1));
  EXPECT_EQ(ReasonOf("a", "request"), "RESIDUAL_CONSUMED");
  EXPECT_EQ(residuals_.counts().residuals, 0);
}

TEST_F(ResidualsTest, EvictionFollowsItsOrder) {
  for (const char* handle : {"d", "c", "b", "a", "e"}) Keep(handle, 1);
  residuals_.Read("b", "request", /*keep=*/false);
  residuals_.Attach("d", 7);
  in_use_ = {"e"};
  EXPECT_THAT(residuals_.EvictionOrder(in_use_), ElementsAre("b", "c", "a", "d"));
  EXPECT_THAT(residuals_.Evict("d"), ElementsAre(7u));
  EXPECT_EQ(ReasonOf("d"), "RESIDUAL_LOST");
}

TEST_F(ResidualsTest, APauseOfTheProcessExtendsExpiry) {
  Keep("a", 1);
  residuals_.Forgive(absl::Seconds(20));
  Pass(absl::Seconds(25));
  EXPECT_EQ(ReasonOf("a"), "");
}

}  // namespace
}  // namespace ringattn::server

// Tests of Ring without requests. Scenarios cover it within the coordinator.
#include "server/core/ring/ring.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

class RingTest : public testing::Test {
 protected:
  RingTest() { batch_.Begin(now_); }

  void Join(ConnectionId connection, const std::string& name) {
    v1::Register registration;
    registration.set_name(name);
    roster_.Add(connection, registration, now_);
  }

  void Pass(absl::Duration time, bool idle = true) {
    now_ += time;
    batch_.Begin(now_);
    ring_.Advance(idle, /*steady=*/true);
  }

  // Returns the receivers of messages of this kind since the last call.
  std::vector<ConnectionId> Sent(v1::JoinResponse::MessageCase kind) {
    std::vector<ConnectionId> to;
    for (const Action& action : batch_.Take()) {
      const auto* send = std::get_if<SendToWorker>(&action);
      if (send != nullptr && send->message.message_case() == kind) to.push_back(send->connection);
    }
    return to;
  }

  void Prepared(ConnectionId connection) {
    v1::Prepared prepared;
    prepared.set_generation(ring_.generation());
    ring_.OnPrepared(connection, prepared);
  }

  bool Committed(ConnectionId connection) {
    v1::Committed committed;
    committed.set_generation(ring_.generation());
    return ring_.OnCommitted(connection, committed);
  }

  void TornDown(ConnectionId connection) {
    v1::TornDown torn_down;
    torn_down.set_generation(ring_.generation());
    ring_.OnTornDown(connection, torn_down);
  }

  void Form(const std::vector<ConnectionId>& members) {
    Pass(absl::ZeroDuration());
    Pass(config_.forming_delay);
    for (ConnectionId member : members) Prepared(member);
    for (ConnectionId member : members) Committed(member);
    batch_.Take();
  }

  CoordinatorConfig config_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  Roster roster_;
  ActionBatch batch_;
  Ring ring_{&config_, &roster_, &batch_};
};

using Kind = v1::JoinResponse;

TEST_F(RingTest, FormsInOrderOfNames) {
  Join(1, "b");
  Join(2, "a");
  Pass(absl::ZeroDuration());
  EXPECT_EQ(ring_.phase(), RingPhase::kGathering);
  Pass(config_.forming_delay);
  EXPECT_EQ(Sent(Kind::kPrepare), (std::vector<ConnectionId>{2, 1}));
  Prepared(1);
  EXPECT_TRUE(Sent(Kind::kCommit).empty());
  Prepared(2);
  EXPECT_EQ(Sent(Kind::kCommit), (std::vector<ConnectionId>{2, 1}));
  EXPECT_TRUE(Committed(1));
  EXPECT_FALSE(Committed(1));
  EXPECT_TRUE(Committed(2));
  EXPECT_TRUE(ring_.ready());
  EXPECT_EQ(ring_.RankOf(2), 0);
  EXPECT_EQ(ring_.RankOf(3), std::nullopt);
}

TEST_F(RingTest, AMemberWithoutAnswerIsOverdue) {
  Join(1, "a");
  Join(2, "b");
  Pass(absl::ZeroDuration());
  Pass(config_.forming_delay);
  Prepared(1);
  const char* what = "";
  EXPECT_TRUE(ring_.Overdue(&what).empty());
  Pass(config_.control_timeout);
  EXPECT_EQ(ring_.Overdue(&what), (std::vector<ConnectionId>{2}));
  EXPECT_STREQ(what, "it did not answer Prepare");
  batch_.Take();
  roster_.Remove(2);
  ring_.OnMemberFailed(2);
  EXPECT_EQ(Sent(Kind::kTeardown), (std::vector<ConnectionId>{1}));
  TornDown(1);
  Pass(absl::ZeroDuration());
  EXPECT_EQ(ring_.phase(), RingPhase::kGathering);
}

TEST_F(RingTest, APauseOfTheProcessExtendsDeadlines) {
  Join(1, "a");
  Pass(absl::ZeroDuration());
  Pass(config_.forming_delay);
  ring_.Forgive(absl::Seconds(60));
  Pass(absl::Seconds(60));
  const char* what = "";
  EXPECT_TRUE(ring_.Overdue(&what).empty());
}

TEST_F(RingTest, AReplacementIsExpectedForAWhile) {
  Join(1, "a");
  Join(2, "b");
  Form({1, 2});
  Pass(config_.assembly_time_max);
  EXPECT_FALSE(ring_.ReplacementIsDue(2));
  roster_.Remove(2);
  ring_.Lose();
  TornDown(1);
  Pass(absl::ZeroDuration());
  Form({1});
  ASSERT_TRUE(ring_.ready());
  EXPECT_TRUE(ring_.ReplacementIsDue(2));
  EXPECT_FALSE(ring_.ReplacementIsDue(3));
  Pass(config_.replacement_time_max);
  EXPECT_FALSE(ring_.ReplacementIsDue(2));
}

TEST_F(RingTest, EndsAfterOperationsThatOutliveALoss) {
  Join(1, "a");
  Join(2, "b");
  Form({1, 2});
  roster_.Remove(2);
  const absl::Time lost = now_;
  ring_.BeginEnding();
  EXPECT_FALSE(ring_.ready());
  EXPECT_TRUE(ring_.has_operations());
  EXPECT_EQ(ring_.RankOf(2), 1);  // for the messages about its loss
  const char* what = "";
  Pass(config_.loss_drain_timeout - absl::Milliseconds(1), /*idle=*/false);
  EXPECT_FALSE(ring_.EndIsDue());
  EXPECT_TRUE(ring_.Overdue(&what).empty());
  EXPECT_TRUE(Sent(v1::JoinResponse::kTeardown).empty());
  ring_.Forgive(absl::Seconds(1));
  Pass(absl::Milliseconds(1), /*idle=*/false);
  EXPECT_FALSE(ring_.EndIsDue());
  Pass(absl::Seconds(1), /*idle=*/false);
  EXPECT_TRUE(ring_.EndIsDue());
  ring_.Lose();
  EXPECT_FALSE(ring_.has_operations());
  EXPECT_EQ(Sent(v1::JoinResponse::kTeardown), (std::vector<ConnectionId>{1}));
  // Limits on waiting count from the loss.
  EXPECT_EQ(ring_.ringless_since(), lost + absl::Seconds(1));
}

TEST_F(RingTest, NewcomersWaitUntilTheRingIsIdle) {
  Join(1, "a");
  Form({1});
  Join(2, "b");
  Pass(config_.forming_delay, /*idle=*/false);
  EXPECT_TRUE(ring_.ready());
  EXPECT_TRUE(ring_.HoldsAdmission());
  Pass(config_.newcomer_hold_max, /*idle=*/false);
  EXPECT_FALSE(ring_.HoldsAdmission());
  Pass(absl::ZeroDuration(), /*idle=*/true);
  EXPECT_EQ(ring_.phase(), RingPhase::kTearingDown);
}

TEST_F(RingTest, ALeavingMemberHoldsAdmissionAndIsReplaced) {
  Join(1, "a");
  Join(2, "b");
  Form({1, 2});
  Pass(config_.assembly_time_max, /*idle=*/false);
  EXPECT_FALSE(ring_.HoldsAdmission());
  roster_.SetLeaving(2);
  // There is no time limit; the worker itself stops waiting.
  Pass(10 * config_.newcomer_hold_max, /*idle=*/false);
  EXPECT_TRUE(ring_.ready());
  EXPECT_TRUE(ring_.HoldsAdmission());
  Pass(absl::ZeroDuration(), /*idle=*/true);
  EXPECT_EQ(ring_.phase(), RingPhase::kTearingDown);
  EXPECT_EQ(Sent(v1::JoinResponse::kTeardown), (std::vector<ConnectionId>{1, 2}));
  roster_.Remove(2);
  TornDown(1);
  TornDown(2);
  Pass(absl::ZeroDuration());
  Form({1});
  ASSERT_TRUE(ring_.ready());
  EXPECT_FALSE(ring_.HoldsAdmission());
  EXPECT_TRUE(ring_.ReplacementIsDue(2));
}

TEST_F(RingTest, AskReformIsAnsweredWithoutWorkers) {
  ring_.AskReform();
  const std::vector<Action> actions = batch_.Take();
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(std::get<RingReformed>(actions[0]).status.code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ringattn::server

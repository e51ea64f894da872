#include "server/core/loss/host_losses.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

class HostLossesTest : public testing::Test {
 protected:
  HostLossesTest() { batch_.Begin(now_); }

  void Join(ConnectionId connection, const std::string& host) {
    v1::Register registration;
    registration.set_name(absl::StrCat("w", connection));
    registration.mutable_location()->set_host(host);
    roster_.Add(connection, registration, now_);
  }

  void Pass(absl::Duration time) {
    now_ += time;
    batch_.Begin(now_);
    losses_.Advance();
  }

  void Lose(ConnectionId connection, LossReason reason = LossReason::kDisconnected) {
    LostWorker loss;
    loss.worker = roster_.NameOf(connection);
    loss.reason = reason;
    const std::string host = roster_.at(connection).registration.location().host();
    roster_.Remove(connection);
    losses_.Add(loss, host);
  }

  // Returns the events since the last call: "host: worker worker".
  std::vector<std::string> Events() {
    std::vector<std::string> events;
    for (const Action& action : batch_.Take()) {
      const auto& event = std::get<LossEvent>(action);
      std::vector<std::string> names;
      for (const LostWorker& loss : event.workers) names.push_back(loss.worker);
      events.push_back(absl::StrCat(event.host, ": ", absl::StrJoin(names, " ")));
    }
    return events;
  }

  CoordinatorConfig config_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  Roster roster_;
  ActionBatch batch_;
  HostLosses losses_{&config_, &roster_, &batch_};
};

TEST_F(HostLossesTest, AHostIsOneEvent) {
  for (ConnectionId connection : {1, 2, 3}) Join(connection, "x");
  Join(4, "y");
  Lose(1);
  EXPECT_FALSE(losses_.Settled());
  Pass(config_.heartbeat_interval);
  Lose(3, LossReason::kSilent);
  EXPECT_TRUE(Events().empty());
  Lose(2, LossReason::kNoAnswer);
  EXPECT_EQ(Events(), (std::vector<std::string>{"x: w1 w3 w2"}));
  EXPECT_TRUE(losses_.Settled());
}

TEST_F(HostLossesTest, OneWorkerOfAHostIsOneEventAfterAHeartbeat) {
  Join(1, "x");
  Join(2, "x");
  Lose(1);
  // No other host could serve meanwhile.
  EXPECT_TRUE(losses_.Settled());
  Join(3, "y");
  EXPECT_FALSE(losses_.Settled());
  Pass(config_.heartbeat_interval);
  EXPECT_TRUE(Events().empty());
  EXPECT_FALSE(losses_.Settled());
  Pass(2 * config_.tick_interval);
  EXPECT_TRUE(losses_.Settled());
  EXPECT_EQ(Events(), (std::vector<std::string>{": w1"}));
  // The next loss has nothing to do with it.
  Lose(2);
  EXPECT_EQ(Events(), (std::vector<std::string>{": w2"}));
}

TEST_F(HostLossesTest, AFaultOfTheWorkerAndAnUnknownHostDoNotWait) {
  Join(1, "x");
  Join(2, "x");
  Join(3, "");
  Join(4, "");
  Lose(1, LossReason::kStuck);
  Lose(3);
  EXPECT_EQ(Events(), (std::vector<std::string>{": w1", ": w3"}));
  EXPECT_TRUE(losses_.Settled());
}

TEST_F(HostLossesTest, APauseOfTheProcessExtendsTheWait) {
  Join(1, "x");
  Join(2, "x");
  Lose(1);
  losses_.Forgive(absl::Seconds(60));
  Pass(absl::Seconds(60));
  EXPECT_TRUE(Events().empty());
  Pass(absl::Seconds(2));
  EXPECT_EQ(Events(), (std::vector<std::string>{": w1"}));
}

}  // namespace
}  // namespace ringattn::server

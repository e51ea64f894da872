#include "server/core/loss/suspicion.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

// Three workers in a formed ring, with connections 1, 2 and 3.
class SuspicionTest : public testing::Test {
 protected:
  SuspicionTest() {
    batch_.Begin(now_);
    for (ConnectionId connection = 1; connection <= 3; ++connection) {
      v1::Register registration;
      registration.set_name(absl::StrCat("w", connection));
      roster_.Add(connection, registration, now_);
    }
    ring_.Advance(true, true);
    Pass(config_.forming_delay);
    ring_.Advance(true, true);
    for (ConnectionId connection = 1; connection <= 3; ++connection) {
      v1::Prepared prepared;
      prepared.set_generation(1);
      ring_.OnPrepared(connection, prepared);
    }
    for (ConnectionId connection = 1; connection <= 3; ++connection) {
      v1::Committed committed;
      committed.set_generation(1);
      ring_.OnCommitted(connection, committed);
    }
    EXPECT_TRUE(ring_.ready());
  }

  void Pass(absl::Duration time) {
    now_ += time;
    batch_.Begin(now_);
  }

  void Report(ConnectionId reporter) {
    v1::GenerationFailed failed;
    failed.set_generation(1);
    failed.set_operation_id("1-1");
    failed.set_step(4);
    failed.set_reason("reset");
    suspicion_.Report(reporter, failed, ring_, roster_, now_, config_.blame_window);
  }

  CoordinatorConfig config_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  ActionBatch batch_;
  Roster roster_;
  Ring ring_{&config_, &roster_, &batch_};
  FairOrder order_;
  Operations operations_{&config_, &batch_, &order_};
  Suspicion suspicion_;
};

TEST_F(SuspicionTest, TheFirstReportOpensTheWindow) {
  EXPECT_FALSE(suspicion_.open());
  Report(2);
  EXPECT_EQ(suspicion_.first_report(), "w2 at step 4: reset");
  Pass(config_.blame_window / 2);
  Report(3);
  EXPECT_EQ(suspicion_.first_report(), "w2 at step 4: reset");
  EXPECT_FALSE(suspicion_.IsDue(now_));
  Pass(config_.blame_window / 2);
  EXPECT_TRUE(suspicion_.IsDue(now_));
  suspicion_.Close();
  EXPECT_FALSE(suspicion_.IsDue(now_));
}

TEST_F(SuspicionTest, AWorkerWithoutMessagesIsSilent) {
  Report(2);
  Pass(config_.blame_window);
  roster_.Heard(2, now_);
  roster_.Heard(3, now_);
  const std::vector<RankState> ranks = suspicion_.Evidence(ring_, roster_, operations_, now_);
  ASSERT_EQ(ranks.size(), 3u);
  EXPECT_TRUE(ranks[0].silent);
  EXPECT_FALSE(ranks[1].silent);
  EXPECT_EQ(RankToBlame(ranks), 0);
}

TEST_F(SuspicionTest, APauseOfTheProcessExtendsTheWindow) {
  Report(2);
  suspicion_.Forgive(absl::Seconds(60));
  Pass(absl::Seconds(60));
  EXPECT_FALSE(suspicion_.IsDue(now_));
}

}  // namespace
}  // namespace ringattn::server

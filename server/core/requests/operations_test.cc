// Tests of Operations without requests or a ring.
#include "server/core/requests/operations.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using Kind = Operations::ReserveResult::Kind;
using Phase = Operation::Phase;
constexpr uint64_t kGeneration = 3;

class OperationsTest : public testing::Test {
 protected:
  OperationsTest() { batch_.Begin(now_); }

  void Pass(absl::Duration time) {
    now_ += time;
    batch_.Begin(now_);
  }

  // Starts an operation of this stream on these members.
  std::string Start(StreamId stream, const std::vector<ConnectionId>& members,
                    double run_seconds = 0.001, double step_seconds = 0) {
    Operations::Order order;
    order.stream = stream;
    order.step_seconds = step_seconds;
    order.client = "client";
    order.cost_seconds = order.run_seconds = run_seconds;
    order.may_preempt = may_preempt_;
    order.members = members;
    order.bytes.assign(members.size(), 100);
    order.reserve.set_operation_id(operations_.NextId(kGeneration));
    order.reserve.set_generation(kGeneration);
    order.inline_inputs = inline_inputs_;
    order_.Enter(stream, "client", run_seconds);
    is_inline_ = operations_.Start(order);
    return order.reserve.operation_id();
  }

  Operations::ReserveResult Reserved(ConnectionId connection, const std::string& id, bool ok) {
    v1::Reserved reserved;
    Name(id, &reserved);
    reserved.set_ok(ok);
    return operations_.OnReserved(connection, reserved);
  }

  void Uploaded(ConnectionId connection, const std::string& id) {
    v1::Uploaded uploaded;
    Name(id, &uploaded);
    operations_.OnUploaded(connection, uploaded);
  }

  Operation* Finished(ConnectionId connection, const std::string& id, bool ok = true) {
    v1::Finished finished;
    Name(id, &finished);
    finished.set_ok(ok);
    return operations_.OnFinished(connection, finished, "name", 0);
  }

  void Released(ConnectionId connection, const std::string& id) {
    v1::Released released;
    Name(id, &released);
    operations_.OnReleased(connection, released);
  }

  // Starts an operation, reserved and uploaded on all members.
  std::string StartUploaded(StreamId stream, const std::vector<ConnectionId>& members,
                            double run_seconds = 0.001) {
    const std::string id = Start(stream, members, run_seconds);
    for (ConnectionId member : members) Reserved(member, id, true);
    operations_.Accept(*operations_.Find(id));
    for (ConnectionId member : members) Uploaded(member, id);
    return id;
  }

  int Sent(v1::JoinResponse::MessageCase kind) {
    int count = 0;
    for (const Action& action : batch_.Take()) {
      const auto* send = std::get_if<SendToWorker>(&action);
      count += send != nullptr && send->message.message_case() == kind;
    }
    return count;
  }

  template <typename Message>
  static void Name(const std::string& id, Message* message) {
    message->set_operation_id(id);
    message->set_generation(kGeneration);
  }

  // Returns how much more this client was charged than the other client, which was charged nothing.
  // Of two equal requests, the second finishes at twice their cost.
  double Charged() {
    order_.Enter(1001, "client", 1e-9);
    double low = 0, high = 1000;
    while (high - low > 1e-6) {  // bisection with requests that start later
      const double middle = (low + high) / 2;
      order_.Enter(2000, "other", middle);
      order_.Enter(2001, "other", middle);
      (order_.Before(2001, 1001) ? low : high) = middle;
      order_.Finish(2001, 0);
      order_.Finish(2000, 0);
    }
    order_.Finish(1001, 0);
    return 2 * low;
  }

  CoordinatorConfig config_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  bool may_preempt_ = true;
  std::shared_ptr<const InlineTensors> inline_inputs_;  // of the operations to start
  bool is_inline_ = false;                              // the operation started last
  ActionBatch batch_;
  FairOrder order_;
  Operations operations_{&config_, &batch_, &order_};
};

TEST_F(OperationsTest, FromReserveToRelease) {
  const std::string id = Start(1, {10, 11});
  EXPECT_EQ(Sent(v1::JoinResponse::kReserve), 2);
  EXPECT_EQ(Reserved(10, id, true).kind, Kind::kNothing);
  EXPECT_EQ(Reserved(10, id, true).kind, Kind::kNothing);  // repeated
  const Operations::ReserveResult result = Reserved(11, id, true);
  ASSERT_EQ(result.kind, Kind::kAllReserved);
  operations_.Accept(*result.operation);
  Uploaded(10, id);
  EXPECT_TRUE(operations_.StartDueRuns().empty());
  Uploaded(11, id);
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{1}));
  EXPECT_EQ(Sent(v1::JoinResponse::kRun), 2);
  EXPECT_FALSE(Operations::AllFinished(*Finished(10, id)));
  EXPECT_EQ(Finished(10, id), nullptr);  // repeated
  Operation* operation = Finished(11, id);
  EXPECT_TRUE(Operations::AllFinished(*operation));
  operations_.BeginDownload(*operation);
  operations_.Close(*operation);
  EXPECT_EQ(Sent(v1::JoinResponse::kRelease), 2);
  Released(10, id);
  EXPECT_EQ(operations_.ReservedByWorker().count(10), 0u);
  EXPECT_EQ(operations_.ReservedByWorker().at(11), 100);
  Released(11, id);
  EXPECT_TRUE(operations_.empty());
  EXPECT_EQ(operations_.releases(), 1u);
}

TEST_F(OperationsTest, MessagesOfAnotherGenerationAreIgnored) {
  const std::string id = Start(1, {10});
  v1::Reserved reserved;
  reserved.set_operation_id(id);
  reserved.set_generation(kGeneration - 1);
  reserved.set_ok(true);
  EXPECT_EQ(operations_.OnReserved(10, reserved).kind, Kind::kNothing);
  EXPECT_EQ(Reserved(99, id, true).kind, Kind::kNothing);
  EXPECT_EQ(Reserved(10, "3-99", true).kind, Kind::kNothing);
}

TEST_F(OperationsTest, ARefusalReleasesTheOtherMembers) {
  const std::string id = Start(1, {10, 11});
  Reserved(10, id, true);
  const Operations::ReserveResult result = Reserved(11, id, false);
  ASSERT_EQ(result.kind, Kind::kRefused);
  EXPECT_FALSE(operations_.OthersReserve(result.operation));
  result.operation->reservation = Operation::Reservation::kRejected;
  operations_.Withdraw(*result.operation);
  EXPECT_EQ(Sent(v1::JoinResponse::kRelease), 1);  // not to the member that refused
  EXPECT_TRUE(operations_.OthersReserve(nullptr));
  Released(10, id);
  EXPECT_TRUE(operations_.empty());
  EXPECT_EQ(operations_.releases(), 0u);
}

// A run is not sent ahead of a long run, and an operation that shares a worker with a blocked one
// waits.
TEST_F(OperationsTest, RunsAreSentAheadOnlyOfShortRuns) {
  config_.preempt_after = absl::Hours(1);
  const std::string first = StartUploaded(1, {10}, /*run_seconds=*/10);
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{1}));
  StartUploaded(2, {10}, 0.001);
  StartUploaded(3, {11}, 0.001);
  StartUploaded(4, {10, 11}, 0.001);
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{3}));
  Finished(10, first);
  // A ring is not sent ahead of a run on only some of its members.
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{2}));
  Finished(11, "3-3");
  Finished(10, "3-2");
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{4}));
}

// Small runs of one member preempt a long run and wait for one another only.
TEST_F(OperationsTest, SmallRunsPreemptALongRun) {
  const std::string ring = StartUploaded(1, {10, 11}, /*run_seconds=*/10);
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{1}));
  StartUploaded(2, {10}, 0.1);
  StartUploaded(3, {10}, 0.1);
  StartUploaded(4, {10, 11}, 0.1);  // has peers
  StartUploaded(5, {11}, 2);        // too large
  batch_.Take();
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{2}));
  const std::vector<Action> actions = batch_.Take();
  ASSERT_EQ(actions.size(), 1u);
  const v1::Run& run = std::get<SendToWorker>(actions[0]).message.run();
  EXPECT_EQ(run.operation_id(), "3-2");
  EXPECT_EQ(run.preempt_after().nanos(), 5'000'000);
  Finished(10, "3-2");
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{3}));
  Finished(11, ring);
  Finished(10, ring);
  // The ring run does not wait for the end of the third.
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{4}));
}

// A worker that does not serve preemption runs everything in order.
TEST_F(OperationsTest, SmallRunsWaitIfTheirWorkerDoesNotPreempt) {
  may_preempt_ = false;
  const std::string ring = StartUploaded(1, {10, 11}, /*run_seconds=*/10);
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{1}));
  StartUploaded(2, {10}, 0.1);
  EXPECT_TRUE(operations_.StartDueRuns().empty());
  Finished(11, ring);
  Finished(10, ring);
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{2}));
}

TEST_F(OperationsTest, AnInlineOperationNeedsOneMessageEachWay) {
  inline_inputs_ = std::make_shared<const InlineTensors>(InlineTensors{{TensorId::kK, "data"}});
  const std::string id = Start(1, {10});
  ASSERT_TRUE(is_inline_);
  const std::vector<Action> actions = batch_.Take();
  ASSERT_EQ(actions.size(), 1u);
  const v1::InlineRun& run = std::get<SendToWorker>(actions[0]).message.reserve().inline_run();
  ASSERT_EQ(run.inputs_size(), 1);
  EXPECT_EQ(run.inputs(0).tensor(), v1::TENSOR_ID_K);
  EXPECT_EQ(run.inputs(0).data(), "data");
  EXPECT_EQ(operations_.Find(id)->phase, Phase::kRunning);
  EXPECT_EQ(operations_.ReservedByWorker().at(10), 100);
  Operation* const finished = Finished(10, id);
  ASSERT_NE(finished, nullptr);
  EXPECT_TRUE(Operations::AllFinished(*finished));
  EXPECT_TRUE(Operations::AllDelivered(*finished));
  EXPECT_TRUE(operations_.ReservedByWorker().empty());
  operations_.Close(*finished);
  EXPECT_TRUE(operations_.empty());
  EXPECT_TRUE(batch_.Take().empty());
  EXPECT_FALSE(order_.Has(1));
}

// Neither a long run, nor one that must wait, nor one that would overtake.
TEST_F(OperationsTest, OnlyRunsThatStartAtOnceAreInline) {
  inline_inputs_ = std::make_shared<const InlineTensors>(InlineTensors{{TensorId::kK, "data"}});
  Start(1, {10}, /*run_seconds=*/1);
  EXPECT_FALSE(is_inline_);
  Start(2, {10}, 0.03);
  EXPECT_TRUE(is_inline_);
  Start(3, {10}, 0.03);
  EXPECT_TRUE(is_inline_);
  Start(4, {10}, 0.03);  // 60 ms of runs are ahead of it
  EXPECT_FALSE(is_inline_);
  Start(5, {11}, 0.03);
  EXPECT_TRUE(is_inline_);
  inline_inputs_ = nullptr;
  StartUploaded(6, {12});
  inline_inputs_ = std::make_shared<const InlineTensors>(InlineTensors{{TensorId::kK, "data"}});
  Start(7, {12});  // the other has not been sent to the worker yet
  EXPECT_FALSE(is_inline_);
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{6}));
}

TEST_F(OperationsTest, ARejectedInlineOperationWaitsAgain) {
  inline_inputs_ = std::make_shared<const InlineTensors>(InlineTensors{{TensorId::kK, "data"}});
  const std::string id = Start(1, {10});
  EXPECT_FALSE(order_.Waits(1));
  const Operations::ReserveResult result = Reserved(10, id, false);
  EXPECT_EQ(result.kind, Kind::kRefused);
  EXPECT_TRUE(order_.Waits(1));
  operations_.Withdraw(*result.operation);
  EXPECT_TRUE(operations_.empty());
}

// The rejection crosses with Cancel.
TEST_F(OperationsTest, AnInlineOperationIsRejectedAfterItsEnd) {
  inline_inputs_ = std::make_shared<const InlineTensors>(InlineTensors{{TensorId::kK, "data"}});
  const std::string id = Start(1, {10});
  operations_.Close(*operations_.Find(id));
  EXPECT_FALSE(operations_.empty());
  EXPECT_EQ(Reserved(10, id, false).kind, Kind::kNothing);
  EXPECT_TRUE(operations_.empty());
  EXPECT_FALSE(order_.Has(1));
}

// An operation that may not run yet blocks what comes after it in the fair order, small or not.
TEST_F(OperationsTest, PreemptionWaitsForItsTurn) {
  StartUploaded(1, {10}, 10);
  operations_.StartDueRuns();
  Operations::Order other;
  other.stream = 2;
  other.client = "other";
  other.may_preempt = true;
  other.cost_seconds = other.run_seconds = 20;
  other.members = {10};
  other.bytes = {100};
  other.reserve.set_operation_id(operations_.NextId(kGeneration));
  other.reserve.set_generation(kGeneration);
  order_.Enter(2, "other", 20);
  order_.Finish(1, 100);  // its client has had more than its share
  operations_.Start(other);
  Reserved(10, "3-2", true);
  operations_.Accept(*operations_.Find("3-2"));
  Uploaded(10, "3-2");
  StartUploaded(3, {10}, 0.1);
  EXPECT_TRUE(operations_.StartDueRuns().empty());
}

// A pause counts neither as service of the run that pauses nor towards its limits.
TEST_F(OperationsTest, AClientIsNotChargedForPauses) {
  order_.Enter(999, "waits", 1000);
  config_.progress_timeout = absl::Seconds(20);
  const std::string large = StartUploaded(1, {10}, /*run_seconds=*/1);
  operations_.StartDueRuns();
  Pass(absl::Seconds(15));
  const std::string small = StartUploaded(2, {10}, 0.1);
  operations_.StartDueRuns();
  EXPECT_TRUE(operations_.Find(small)->preempts);
  Pass(absl::Seconds(1));
  v1::Finished finished;
  Name(small, &finished);
  finished.set_ok(true);
  finished.mutable_report()->mutable_compute_time()->set_nanos(750'000'000);
  operations_.OnFinished(10, finished, "name", 0);
  Pass(absl::Seconds(4.5));
  EXPECT_EQ(operations_.FindStalledRun(), nullptr);
  Pass(absl::Seconds(1));
  EXPECT_EQ(operations_.FindStalledRun()->id, large);
  Finished(10, large);
  // 20.75 for the large one and 0.75 for the small one. Clients are compared from when the latter
  // started, at the expected end of the former.
  EXPECT_NEAR(Charged(), 20.5, 1e-3);
}

// Heartbeats name the run that preempts in addition to the other one.
TEST_F(OperationsTest, ARunThatPreemptsReportsProgress) {
  config_.progress_timeout = absl::Seconds(20);
  const std::string large = StartUploaded(1, {10}, 100);
  operations_.StartDueRuns();
  const std::string small = StartUploaded(2, {10}, 0.1);
  operations_.StartDueRuns();
  for (int i = 1; i <= 25; ++i) {
    Pass(absl::Seconds(1));
    v1::Heartbeat heartbeat;
    Name(large, &heartbeat);
    heartbeat.set_progress(i);
    if (i < 5) {
      Name(small, heartbeat.mutable_preempting());
      heartbeat.mutable_preempting()->set_progress(i);
    }
    operations_.OnHeartbeat(10, heartbeat);
    const Operation* const stalled = operations_.FindStalledRun();
    EXPECT_EQ(stalled == nullptr, i <= 24) << i;
  }
  EXPECT_EQ(operations_.FindStalledRun()->id, small);
}

TEST_F(OperationsTest, RunsFollowTheFairOrder) {
  const std::string first = StartUploaded(1, {10}, 10);
  operations_.StartDueRuns();
  const std::string late = Start(2, {10}, 10);
  StartUploaded(3, {10}, 10);
  Reserved(10, late, true);
  operations_.Accept(*operations_.Find(late));
  Uploaded(10, late);  // the last to complete its inputs
  Finished(10, first);
  EXPECT_EQ(operations_.StartDueRuns(), (std::vector<StreamId>{2}));
}

TEST_F(OperationsTest, ACancelledMemberFinishesItsExchanges) {
  const std::string id = StartUploaded(1, {10, 11});
  operations_.StartDueRuns();
  Finished(10, id);
  batch_.Take();
  operations_.Close(*operations_.Find(id));
  EXPECT_EQ(Sent(v1::JoinResponse::kCancel), 1);
  EXPECT_EQ(operations_.Find(id)->phase, Phase::kRunning);
}

TEST_F(OperationsTest, TimersReportOverdueMembers) {
  const std::string id = Start(1, {10, 11});
  Reserved(10, id, true);
  Pass(config_.control_timeout);
  EXPECT_TRUE(operations_.CheckTimers().members.empty());
  Pass(absl::Milliseconds(1));
  // A slow Reserve ends the request only.
  Operations::Overdue overdue = operations_.CheckTimers();
  EXPECT_TRUE(overdue.members.empty());
  ASSERT_EQ(overdue.requests.size(), 1u);
  EXPECT_EQ(overdue.requests[0].second.reason, "RESERVE_SLOW");
  operations_.Close(*operations_.Find(id));
  Pass(config_.control_timeout);
  EXPECT_TRUE(operations_.CheckTimers().members.empty());
  Pass(absl::Milliseconds(1));
  overdue = operations_.CheckTimers();
  ASSERT_EQ(overdue.members.size(), 2u);
  EXPECT_EQ(overdue.members[0].connection, 10u);
  EXPECT_EQ(overdue.members[0].detail, "it did not answer Release");
  operations_.Forgive(config_.control_timeout);
  EXPECT_TRUE(operations_.CheckTimers().members.empty());
}

// A worker makes the same plan again, and the plans of earlier requests before it.
TEST_F(OperationsTest, ReserveMayTakeLongerForExpensivePlans) {
  Operations::Order order;
  order.members = {10};
  order.bytes = {100};
  order.reserve.set_generation(kGeneration);
  order.planning_seconds = 2;
  for (StreamId stream : {1, 2}) {
    order.stream = stream;
    order.reserve.set_operation_id(operations_.NextId(kGeneration));
    order_.Enter(stream, "client", 1);
    operations_.Start(order);
  }
  Pass(config_.control_timeout + 2 * config_.reserve_factor * absl::Seconds(1));
  EXPECT_TRUE(operations_.CheckTimers().requests.empty());
  Pass(absl::Seconds(1));
  ASSERT_EQ(operations_.CheckTimers().requests.size(), 1u);
  EXPECT_EQ(operations_.CheckTimers().requests[0].first, 1u);
  Pass(2 * config_.reserve_factor * absl::Seconds(1));
  EXPECT_EQ(operations_.CheckTimers().requests.size(), 2u);
}

// Kernels slower than the plan assumed extend the limits.
TEST_F(OperationsTest, SlowKernelsExtendTheLimits) {
  const double seconds = 1000;  // so that the factor exceeds the minimum
  StreamId stream = 0;
  const auto limits = [&](double first, double second) {
    const std::string id = Start(++stream, {10, 11}, seconds, seconds);
    for (const auto& [connection, slowdown] : {std::pair(10, first), std::pair(11, second)}) {
      v1::Reserved reserved;
      Name(id, &reserved);
      reserved.set_ok(true);
      reserved.set_slowdown(slowdown);
      operations_.OnReserved(connection, reserved);
    }
    const Operation& operation = *operations_.Find(id);
    return std::pair(operation.progress_timeout, operation.run_limit);
  };
  const auto step = config_.progress_factor * absl::Seconds(seconds);
  const auto run = config_.run_time_factor * absl::Seconds(seconds);
  ASSERT_GT(step, config_.progress_timeout);
  ASSERT_GT(run, config_.run_time_floor);
  EXPECT_EQ(limits(1, 1), std::pair(step, run));
  EXPECT_EQ(limits(0, 0), std::pair(step, run));  // a worker that reports no slowdown
  EXPECT_EQ(limits(40, 1), std::pair(40 * step, 40 * run));
  EXPECT_EQ(limits(2, 3), std::pair(3 * step, 3 * run));
  EXPECT_EQ(limits(-5, std::nan("")), std::pair(step, run));
  EXPECT_EQ(limits(1e300, 1), std::pair(1000 * step, 1000 * run));
}

TEST_F(OperationsTest, AnIdleUploadEndsItsRequest) {
  const std::string id = Start(1, {10});
  Reserved(10, id, true);
  operations_.Accept(*operations_.Find(id));
  Pass(config_.limits.upload_idle_timeout);
  operations_.OnTransferProgress(*operations_.Find(id), Phase::kUploading);
  Pass(config_.limits.upload_idle_timeout);
  EXPECT_TRUE(operations_.CheckTimers().requests.empty());
  Pass(absl::Milliseconds(1));
  const Operations::Overdue overdue = operations_.CheckTimers();
  ASSERT_EQ(overdue.requests.size(), 1u);
  EXPECT_EQ(overdue.requests[0].second.reason, "UPLOAD_IDLE");
}

// Time spent waiting for earlier runs does not count.
TEST_F(OperationsTest, ARunsTimeCountsFromItsStart) {
  config_.run_time_floor = absl::Seconds(10);
  const std::string first = StartUploaded(1, {10});
  StartUploaded(2, {10});
  EXPECT_EQ(operations_.StartDueRuns().size(), 2u);
  Pass(absl::Seconds(9));
  EXPECT_TRUE(operations_.CheckTimers().requests.empty());
  Pass(absl::Seconds(2));
  const Operations::Overdue overdue = operations_.CheckTimers();
  ASSERT_EQ(overdue.requests.size(), 1u);
  EXPECT_EQ(overdue.requests[0].first, 1u);
  EXPECT_EQ(overdue.requests[0].second.reason, "RUN_TOO_LONG");
  Finished(10, first);
  operations_.Close(*operations_.Find(first));
  Pass(absl::Seconds(9));
  EXPECT_TRUE(operations_.CheckTimers().requests.empty());
  Pass(absl::Seconds(2));
  EXPECT_EQ(operations_.CheckTimers().requests.size(), 1u);
}

// The expected cost is one millisecond each.
TEST_F(OperationsTest, AFinishedRunIsChargedItsActualCost) {
  order_.Enter(999, "waits", 1000);  // without a waiting request, nothing is charged
  const std::string id = StartUploaded(1, {10, 11});
  operations_.StartDueRuns();
  EXPECT_NEAR(Charged(), 0.001, 1e-4);
  Pass(absl::Seconds(3));
  Finished(10, id);
  EXPECT_NEAR(Charged(), 0.001, 1e-4);
  Pass(absl::Seconds(1));
  Finished(11, id);
  EXPECT_NEAR(Charged(), 7, 1e-4);  // of two devices
}

// An earlier run on the same worker is charged to its own client.
TEST_F(OperationsTest, ARunIsChargedFromWhenItsDeviceWasFree) {
  order_.Enter(999, "waits", 1000);
  const std::string first = StartUploaded(1, {10});
  const std::string second = StartUploaded(2, {10});
  EXPECT_EQ(operations_.StartDueRuns().size(), 2u);
  Pass(absl::Seconds(5));
  Finished(10, first);
  EXPECT_NEAR(Charged(), 5, 0.01);
  Pass(absl::Seconds(2));
  // one of these seconds, in which the coordinator was paused
  operations_.Forgive(absl::Seconds(1));
  Finished(10, second);
  EXPECT_NEAR(Charged(), 6, 0.01);
}

TEST_F(OperationsTest, ACancelledRunIsChargedUntilItsWorkersStop) {
  order_.Enter(999, "waits", 1000);
  const std::string id = StartUploaded(1, {10});
  operations_.StartDueRuns();
  Pass(absl::Seconds(2));
  operations_.Close(*operations_.Find(id));
  EXPECT_NEAR(Charged(), 0.001, 1e-4);
  Pass(absl::Seconds(1));
  Finished(10, id, /*ok=*/false);
  EXPECT_NEAR(Charged(), 3, 1e-4);
}

TEST_F(OperationsTest, RunsEndedByALostWorkerAreCharged) {
  order_.Enter(999, "waits", 1000);
  StartUploaded(1, {10});
  StartUploaded(2, {10});  // does not start to run
  operations_.StartDueRuns();
  Pass(absl::Seconds(4));
  operations_.Clear();
  EXPECT_NEAR(Charged(), 4, 0.01);
}

TEST_F(OperationsTest, SiteReportsOccupancy) {
  StartUploaded(1, {10}, 8);
  Start(2, {10, 11}, 2);
  const std::vector<Site> sites = operations_.SitesOf({10, 11, 12});
  const Site& site = sites[0];
  EXPECT_EQ(site.operations, 2);
  EXPECT_EQ(site.reserved_bytes, 200);
  EXPECT_EQ(site.largest_cost, 8);
  EXPECT_TRUE(site.computes);
  EXPECT_EQ(sites[1].operations, 1);
  EXPECT_FALSE(sites[1].computes);
  EXPECT_EQ(sites[2].operations, 0);
}

}  // namespace
}  // namespace ringattn::server

// Whole workers as members of rings: heartbeats, teardown, lost coordinators and peers, leaving,
// and rings that do not form.
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/testing/cluster.h"

namespace ringattn::worker {
namespace {

using Message = v1::JoinRequest;
using testing::HasSubstr;

// Returns the rank's first new heartbeat that satisfies `wanted`, or the latest after ten seconds.
v1::Heartbeat AwaitHeartbeat(Cluster& cluster, int rank,
                             const std::function<bool(const v1::Heartbeat&)>& wanted) {
  const absl::Time patience = absl::Now() + absl::Seconds(10);
  v1::Heartbeat heartbeat = cluster.coordinator().LastHeartbeat(Cluster::Name(rank));
  while (!wanted(heartbeat) && absl::Now() < patience) {
    absl::SleepFor(absl::Milliseconds(5));
    heartbeat = cluster.coordinator().LastHeartbeat(Cluster::Name(rank));
  }
  return heartbeat;
}

TEST(WorkerMembership, HeartbeatsDistinguishWaitingFromComputing) {
  Cluster cluster(4);
  cluster.Form(1);
  cluster.device(1).SetDelay(absl::Seconds(60));
  const TestRequest request = TestRequest::Make(64, 4);
  cluster.Reserve(request, "1-1", 1);
  auto exchanges = cluster.UploadAll(request, "1-1", 1);
  cluster.SendRun("1-1", 1);
  // The next rank waits for blocks that the slow rank cannot receive yet.
  const v1::Heartbeat waiting = AwaitHeartbeat(
      cluster, 2, [](const v1::Heartbeat& heartbeat) { return heartbeat.waits_for_peer(); });
  EXPECT_TRUE(waiting.waits_for_peer());
  EXPECT_EQ(waiting.operation_id(), "1-1");
  // A heartbeat that was sent while the other rank waited.
  const uint64_t before = cluster.coordinator().LastHeartbeat("worker-1").sequence();
  const v1::Heartbeat slow = AwaitHeartbeat(cluster, 1, [before](const v1::Heartbeat& heartbeat) {
    return heartbeat.sequence() > before;
  });
  EXPECT_GT(slow.sequence(), before);
  EXPECT_EQ(slow.operation_id(), "1-1");
  EXPECT_EQ(slow.generation(), 1u);
  EXPECT_FALSE(slow.waits_for_peer());
  EXPECT_GT(slow.reserved_bytes(), 0u);
  cluster.TearDown(1);
}

TEST(WorkerMembership, TeardownDuringRunFreesEverythingAndRingReforms) {
  Cluster cluster(3);
  const TestRequest request = TestRequest::Make(48, 3);
  for (uint64_t generation = 1; generation <= 3; ++generation) {
    cluster.Form(generation);
    cluster.device(generation % 3).SetDelay(absl::Seconds(60));
    const std::string id = absl::StrCat(generation, "-1");
    cluster.Reserve(request, id, generation);
    auto exchanges = cluster.UploadAll(request, id, generation);
    cluster.Reserve(request, "not running", generation);
    cluster.SendRun(id, generation);
    absl::SleepFor(absl::Milliseconds(100));
    const absl::Time begin = absl::Now();
    cluster.TearDown(generation);
    EXPECT_LT(absl::Now() - begin, absl::Seconds(15));  // far below the total of a minute
    ExpectAllFree(cluster);
    EXPECT_EQ(exchanges[generation % 3]->Finish().code(), absl::StatusCode::kAborted);
    cluster.device(generation % 3).SetDelay(absl::ZeroDuration());
  }
  cluster.Form(9);
  cluster.RunToTheEnd(request, "9-1", 9);
  EXPECT_TRUE(cluster.stuck().empty());
}

TEST(WorkerMembership, ReportsHangingTeardownAsStuck) {
  Cluster cluster(1, {.ring = {.teardown_timeout = absl::Milliseconds(300)}});
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(16, 1);
  cluster.device(0).SetStuck(true);
  cluster.Reserve(request, "1-1", 1);
  auto exchanges = cluster.UploadAll(request, "1-1", 1);
  cluster.SendRun("1-1", 1);
  while (!cluster.device(0).hangs())
    absl::SleepFor(absl::Milliseconds(1));  // the test times out otherwise
  cluster.TearDown(1);                      // on_stuck unblocks the device instead of exiting
  ASSERT_EQ(cluster.stuck().size(), 1u);
  EXPECT_THAT(cluster.stuck()[0], HasSubstr("generation 1"));
}

TEST(WorkerMembership, FreesEverythingAndReconnectsAfterLosingCoordinator) {
  Cluster cluster(2);
  const TestRequest request = TestRequest::Make(64, 2);
  for (int round = 0; round < 2; ++round) {
    cluster.Form(1);
    for (int rank : {0, 1}) cluster.device(rank).SetDelay(absl::Seconds(60));
    cluster.Reserve(request, "1-1", 1);
    auto exchanges = cluster.UploadAll(request, "1-1", 1);
    cluster.SendRun("1-1", 1);
    absl::SleepFor(absl::Milliseconds(50));
    cluster.VanishCoordinator();
    for (auto& exchange : exchanges) EXPECT_FALSE(exchange->Finish().ok());
    for (int rank : {0, 1}) cluster.device(rank).SetDelay(absl::ZeroDuration());
    cluster.NewCoordinator();
    ExpectAllFree(cluster);
  }
  cluster.Form(1);
  cluster.RunToTheEnd(request, "1-1", 1);
}

TEST(WorkerMembership, LeavesWhenCoordinatorReleasesIt) {
  Cluster cluster(1);
  cluster.Form(1);
  const absl::Time begin = absl::Now();
  std::thread leaving([&] { cluster.worker(0).Leave(absl::Seconds(30)); });
  ASSERT_TRUE(cluster.coordinator().Await("worker-0", Message::kLeaving).has_value());
  // It is still a member and follows messages.
  cluster.RunToTheEnd(TestRequest::Make(64, 1), "1-1", 1);
  v1::JoinResponse leave;
  leave.mutable_leave()->set_exit(true);
  cluster.coordinator().Send("worker-0", leave);
  leaving.join();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  // It does not reconnect: no heartbeat on a new stream.
  const uint64_t last = cluster.coordinator().LastHeartbeat("worker-0").sequence();
  absl::SleepFor(absl::Milliseconds(400));
  EXPECT_EQ(cluster.coordinator().LastHeartbeat("worker-0").sequence(), last);
}

TEST(WorkerMembership, LeaveEndsAtTimeoutOrWithoutCoordinator) {
  Cluster cluster(2);
  cluster.Form(1);
  absl::Time begin = absl::Now();
  cluster.worker(0).Leave(absl::Milliseconds(200));
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(190));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  std::thread leaving([&] { cluster.worker(1).Leave(absl::Seconds(60)); });
  ASSERT_TRUE(cluster.coordinator().Await("worker-1", Message::kLeaving).has_value());
  begin = absl::Now();
  cluster.VanishCoordinator();
  leaving.join();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
}

// The run would otherwise wait until the transfer's time limit. The generation lives on.
TEST(WorkerMembership, LosePeerEndsTheExchangeWithIt) {
  Cluster cluster(2);
  cluster.Form(4);
  const TestRequest request = TestRequest::Make(64, 2);
  cluster.Reserve(request, "4-1", 4);
  auto exchanges = cluster.UploadAll(request, "4-1", 4);
  v1::JoinResponse run;
  run.mutable_run()->set_operation_id("4-1");
  run.mutable_run()->set_generation(4);
  cluster.coordinator().Send("worker-0", run);
  AwaitHeartbeat(cluster, 0,
                 [](const v1::Heartbeat& heartbeat) { return heartbeat.waits_for_peer(); });
  const auto lose = [&](uint64_t generation, uint32_t rank) {
    v1::JoinResponse message;
    message.mutable_lose_peer()->set_generation(generation);
    message.mutable_lose_peer()->set_rank(rank);
    cluster.coordinator().Send("worker-0", message);
  };
  lose(3, 1);  // another generation
  lose(4, 0);  // itself
  lose(4, 2);  // no member
  lose(4, 0xffffffff);
  lose(4, 1);
  const auto failed = cluster.coordinator().Await("worker-0", Message::kGenerationFailed);
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->generation_failed().operation_id(), "4-1");
  EXPECT_THAT(failed->generation_failed().reason(), HasSubstr("rank 1 left the ring"));
  cluster.Release("4-1", 4);
  ExpectAllFree(cluster);
  for (auto& exchange : exchanges) (void)exchange->Finish();
  cluster.TearDown(4);
  cluster.Form(5);
  cluster.RunToTheEnd(request, "5-1", 5);
}

TEST(WorkerMembership, IgnoresMessagesOfOtherGenerations) {
  Cluster cluster(2);
  cluster.Form(4);
  v1::JoinResponse stale;
  stale.mutable_teardown()->set_generation(3);
  cluster.coordinator().Send("worker-0", stale);
  stale.mutable_run()->set_operation_id("unknown");
  cluster.coordinator().Send("worker-0", stale);
  stale.mutable_cancel()->set_operation_id("unknown");
  cluster.coordinator().Send("worker-0", stale);
  stale.mutable_reserve()->set_generation(3);
  cluster.coordinator().Send("worker-0", stale);
  stale.mutable_commit()->set_generation(3);
  cluster.coordinator().Send("worker-0", stale);
  cluster.RunToTheEnd(TestRequest::Make(33, 2), "4-1", 4);
}

TEST(WorkerMembership, TeardownBetweenPrepareAndCommitEndsForming) {
  Cluster cluster(2);
  v1::JoinResponse prepare;
  prepare.mutable_prepare()->set_generation(5);
  prepare.mutable_prepare()->set_world_size(2);
  cluster.coordinator().Send("worker-0", prepare);
  const auto prepared = cluster.coordinator().Await("worker-0", Message::kPrepared);
  ASSERT_TRUE(prepared.has_value());
  // Rank 1 never joins, so rank 0 waits in Commit until the teardown.
  v1::JoinResponse commit, teardown;
  commit.mutable_commit()->set_generation(5);
  for (int rank = 0; rank < 2; ++rank) {
    commit.mutable_commit()->add_blobs(prepared->prepared().blob());
  }
  cluster.coordinator().Send("worker-0", commit);
  teardown.mutable_teardown()->set_generation(5);
  cluster.coordinator().Send("worker-0", teardown);
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(cluster.coordinator().Await("worker-0", Message::kTornDown).has_value());
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  cluster.Form(6);
  cluster.RunToTheEnd(TestRequest::Make(20, 2), "6-1", 6);
}

TEST(WorkerMembership, UnreachablePeerFailsTheGeneration) {
  Cluster cluster(1, {.ring = {.connect_timeout = absl::Milliseconds(200)}});
  v1::JoinResponse prepare, commit;
  prepare.mutable_prepare()->set_generation(5);
  prepare.mutable_prepare()->set_world_size(2);
  cluster.coordinator().Send("worker-0", prepare);
  const auto prepared = cluster.coordinator().Await("worker-0", Message::kPrepared);
  ASSERT_TRUE(prepared.has_value());
  commit.mutable_commit()->set_generation(5);
  commit.mutable_commit()->add_blobs(prepared->prepared().blob());
  commit.mutable_commit()->add_blobs("no address at all");
  // The kernel reports a broadcast address as unreachable.
  commit.mutable_commit()->add_probe_addresses("255.255.255.255:1");
  commit.mutable_commit()->add_probe_addresses("255.255.255.255:1");
  cluster.coordinator().Send("worker-0", commit);
  const auto failed = cluster.coordinator().Await("worker-0", Message::kGenerationFailed);
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->generation_failed().generation(), 5u);
  // Its own address is not probed.
  ASSERT_EQ(failed->generation_failed().unreached_size(), 1);
  EXPECT_EQ(failed->generation_failed().unreached(0), 1u);
}

TEST(WorkerMembership, AnswersProbes) {
  Cluster cluster(1, {.ring_host = "127.0.0.1"});
  v1::JoinResponse probe;
  probe.mutable_probe()->set_id(7);
  probe.mutable_probe()->add_addresses("127.0.0.1:1");  // refuses connections
  probe.mutable_probe()->add_addresses("255.255.255.255:1");
  probe.mutable_probe()->mutable_timeout()->set_seconds(5);
  cluster.coordinator().Send("worker-0", probe);
  const auto probed = cluster.coordinator().Await("worker-0", Message::kProbed);
  ASSERT_TRUE(probed.has_value());
  EXPECT_EQ(probed->probed().id(), 7u);
  ASSERT_EQ(probed->probed().unreached_size(), 1);
  EXPECT_EQ(probed->probed().unreached(0), 1u);
}

}  // namespace
}  // namespace ringattn::worker

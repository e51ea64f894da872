// Equal requests of whole workers: the second one takes the operation that the first one left, and
// the first one takes what was prepared.
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/wire/durations.h"
#include "gtest/gtest.h"
#include "worker/testing/cluster.h"

namespace ringattn::worker {
namespace {

// Waits until a heartbeat has published this line of the worker's metrics.
void AwaitMetric(const Cluster& cluster, int rank, const std::string& line) {
  const absl::Time patience = MonotonicNow() + absl::Seconds(20);
  while (!absl::StrContains(cluster.worker(rank).metrics().Text(), absl::StrCat(line, "\n"))) {
    if (MonotonicNow() > patience) {
      ADD_FAILURE() << line << " not in\n" << cluster.worker(rank).metrics().Text();
      return;
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
}

std::string Lookups(const char* result, int count) {
  return absl::StrCat("ringattn_worker_kept_operation_lookups_total{result=\"", result, "\"} ",
                      count);
}

TEST(EqualRequests, AlternateWithOthersAndOtherData) {
  Cluster cluster(2);
  cluster.Form(1);
  int id = 0;
  for (uint32_t seed = 0; seed < 3; ++seed) {
    for (int64_t tokens : {61, 1, 40}) {
      for (Packing packing : {Packing::kNone, Packing::kQkv}) {
        cluster.RunToTheEnd(TestRequest::Make(tokens, 2, packing, seed), absl::StrCat("1-", ++id),
                            1);
      }
    }
  }
  for (int rank : {0, 1}) {
    AwaitMetric(cluster, rank, Lookups("miss", 6));
    AwaitMetric(cluster, rank, Lookups("hit", 12));
    AwaitMetric(cluster, rank, "ringattn_worker_kept_operations 6");
  }
  ExpectAllFree(cluster);
}

TEST(EqualRequests, OfOtherPrincipalsShareNothing) {
  Cluster cluster(1);
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(61, 1);
  int id = 0;
  const auto run = [&](const std::string& principal) {
    v1::JoinResponse message;
    const std::string operation = absl::StrCat("1-", ++id);
    *message.mutable_reserve() = cluster.MakeReserve(request, operation, 1);
    message.mutable_reserve()->set_principal(principal);
    cluster.coordinator().Send(Cluster::Name(0), message);
    EXPECT_TRUE(
        cluster.coordinator().Await(Cluster::Name(0), v1::JoinRequest::kReserved).has_value());
    auto exchanges = cluster.UploadAll(request, operation, 1);
    cluster.SendRun(operation, 1);
    EXPECT_TRUE(cluster.AwaitFinished()[0].ok());
    TensorMap outputs = request.expected;
    EXPECT_TRUE(exchanges[0]->Download(request, 0, &outputs).ok());
    EXPECT_TRUE(outputs == request.expected);
    cluster.Release(operation, 1);
  };
  run("alice");
  run("bob");
  run("");
  AwaitMetric(cluster, 0, Lookups("miss", 3));
  AwaitMetric(cluster, 0, Lookups("hit", 0));
  run("bob");
  AwaitMetric(cluster, 0, Lookups("hit", 1));
}

TEST(EqualRequests, NothingIsKeptBeyondTheRing) {
  Cluster cluster(1);
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(61, 1);
  cluster.RunToTheEnd(request, "1-1", 1);
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operations 1");
  cluster.TearDown(1);
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operation_bytes 0");
  cluster.Form(2);
  cluster.RunToTheEnd(request, "2-1", 2);
  AwaitMetric(cluster, 0, Lookups("miss", 2));
}

TEST(EqualRequests, NothingIsKeptBeyondTheLease) {
  Cluster cluster(1, {.prepared_lease = absl::Milliseconds(50)});
  cluster.Form(1);
  cluster.RunToTheEnd(TestRequest::Make(61, 1), "1-1", 1);
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operation_drops_total{reason=\"expired\"} 1");
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operation_bytes 0");
}

TEST(EqualRequests, AreNotKeptWithoutALease) {
  Cluster cluster(1, {.prepared_lease = absl::ZeroDuration()});
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(61, 1);
  cluster.RunToTheEnd(request, "1-1", 1);
  cluster.RunToTheEnd(request, "1-2", 1);
  AwaitMetric(cluster, 0, Lookups("miss", 2));
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operations 0");
}

// Requests that need the memory of kept operations get it at once.
TEST(EqualRequests, GiveWayToOthers) {
  Cluster probe(1);
  probe.Form(1);
  const TestRequest request = TestRequest::Make(61, 1);
  v1::JoinResponse message;
  *message.mutable_reserve() = probe.MakeReserve(request, "1-1", 1);
  probe.coordinator().Send(Cluster::Name(0), message);
  const auto reserved = probe.coordinator().Await(Cluster::Name(0), v1::JoinRequest::kReserved);
  ASSERT_TRUE(reserved.has_value());
  const auto bytes = static_cast<int64_t>(reserved->reserved().bytes());

  Cluster cluster(1, {.memory_limit_bytes = 4 * bytes});
  cluster.Form(1);
  cluster.RunToTheEnd(request, "1-1", 1);
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operations 1");
  cluster.RunToTheEnd(TestRequest::Make(4 * 58, 1), "1-2", 1);  // does not fit next to it
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operation_drops_total{reason=\"evicted\"} 1");
  ExpectAllFree(cluster);
}

// Asks all workers to prepare the request. Returns what they answered.
std::vector<v1::Reserved> Prepare(Cluster& cluster, const TestRequest& request,
                                  const std::string& id, absl::Duration ttl) {
  std::vector<v1::Reserved> answers;
  for (int rank = 0; rank < cluster.size(); ++rank) {
    v1::JoinResponse message;
    *message.mutable_reserve() = cluster.MakeReserve(request, id, 1);
    SetDuration(ttl, message.mutable_reserve()->mutable_prepare_only()->mutable_ttl());
    cluster.coordinator().Send(Cluster::Name(rank), message);
  }
  for (int rank = 0; rank < cluster.size(); ++rank) {
    const auto answer =
        cluster.coordinator().Await(Cluster::Name(rank), v1::JoinRequest::kReserved);
    EXPECT_TRUE(answer.has_value());
    if (answer.has_value()) answers.push_back(answer->reserved());
  }
  return answers;
}

std::string Preparations(const char* result, int count) {
  return absl::StrCat("ringattn_worker_preparations_total{result=\"", result, "\"} ", count);
}

TEST(PreparedRequests, AreFoundByTheFirstRun) {
  Cluster cluster(2);
  cluster.Form(1);
  for (const v1::Reserved& answer :
       Prepare(cluster, TestRequest::Make(61, 2), "1-1", absl::Seconds(60))) {
    EXPECT_TRUE(answer.ok()) << answer.reason();
    EXPECT_FALSE(answer.found());
    EXPECT_GT(answer.bytes(), 0u);
  }
  for (const v1::Reserved& answer :
       Prepare(cluster, TestRequest::Make(61, 2, Packing::kNone, 1), "1-2", absl::Seconds(60))) {
    EXPECT_TRUE(answer.found());
  }
  cluster.RunToTheEnd(TestRequest::Make(61, 2, Packing::kNone, 2), "1-3", 1);
  for (int rank : {0, 1}) {
    AwaitMetric(cluster, rank, Lookups("hit", 1));
    AwaitMetric(cluster, rank, Lookups("miss", 0));
    AwaitMetric(cluster, rank, Preparations("made", 1));
    AwaitMetric(cluster, rank, Preparations("found", 1));
    AwaitMetric(cluster, rank, "ringattn_worker_prepared_recipes 1");
  }
  ExpectAllFree(cluster);
  cluster.TearDown(1);
  AwaitMetric(cluster, 0, "ringattn_worker_prepared_recipes 0");
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operation_bytes 0");
}

TEST(PreparedRequests, AreKeptBeyondTheLeaseOfOthers) {
  Cluster cluster(1, {.prepared_lease = absl::Milliseconds(50)});
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(61, 1);
  Prepare(cluster, request, "1-1", absl::Seconds(60));
  cluster.RunToTheEnd(TestRequest::Make(40, 1), "1-2", 1);
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operation_drops_total{reason=\"expired\"} 1");
  cluster.RunToTheEnd(request, "1-3", 1);
  absl::SleepFor(absl::Milliseconds(100));
  cluster.RunToTheEnd(request, "1-4", 1);
  AwaitMetric(cluster, 0, Lookups("hit", 2));
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operations 1");
}

TEST(PreparedRequests, EndWithTheirOwnLease) {
  Cluster cluster(1, {.prepared_lease = absl::Milliseconds(20)});
  cluster.Form(1);
  Prepare(cluster, TestRequest::Make(61, 1), "1-1", absl::Milliseconds(60));
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operation_drops_total{reason=\"expired\"} 1");
  AwaitMetric(cluster, 0, "ringattn_worker_kept_operation_bytes 0");
  AwaitMetric(cluster, 0, "ringattn_worker_prepared_recipes 0");
}

TEST(PreparedRequests, AreRefusedByWorkersThatKeepNothing) {
  Cluster cluster(1, {.prepared_lease = absl::ZeroDuration()});
  cluster.Form(1);
  const auto answers = Prepare(cluster, TestRequest::Make(61, 1), "1-1", absl::Seconds(60));
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_FALSE(answers[0].ok());
  EXPECT_TRUE(answers[0].not_kept());
  EXPECT_TRUE(absl::StrContains(answers[0].reason(), "--prepared_lease=0")) << answers[0].reason();
  ExpectAllFree(cluster);
}

}  // namespace
}  // namespace ringattn::worker

// Equal requests of whole workers: the second one takes the operation that the first one left.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
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

}  // namespace
}  // namespace ringattn::worker

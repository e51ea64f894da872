#include "server/edge/status/server_metrics.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

v1::Topology With(const std::string& worker) {
  v1::Topology topology;
  topology.add_workers()->set_name(worker);
  return topology;
}

LostWorker Loss(const std::string& worker, LossReason reason) {
  LostWorker loss;
  loss.worker = worker;
  loss.reason = reason;
  return loss;
}

size_t SeriesOf(const Metrics& metrics, const std::string& name) {
  const std::string text = metrics.Text();
  size_t count = 0;
  for (size_t at = 0; (at = text.find("\n" + name + "{", at)) != std::string::npos; ++at) ++count;
  return count;
}

TEST(ServerMetricsTest, KvCachesCountByReasonOfTheirEnd) {
  Metrics metrics;
  ServerMetrics server(&metrics, Limits());
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_kv_caches_ended_total{reason=\"lost\"} 0"));
  CoordinatorStats stats;
  stats.kv_caches.caches = 3;
  stats.kv_caches.bytes = 4096;
  stats.kv_caches.ended[static_cast<size_t>(KvCacheEnd::kLost)] = 2;
  server.SetStats(stats);
  server.SetStats(stats);
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_kv_caches 3\n"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_kv_cache_bytes 4096\n"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_kv_caches_ended_total{reason=\"lost\"} 2"));
  server.KvStepRelayed(absl::Milliseconds(3));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_kv_step_seconds_count 1\n"));
}

TEST(ServerMetricsTest, PlansCountBySource) {
  Metrics metrics;
  ServerMetrics server(&metrics, Limits());
  PlanningStats stats;
  stats.made = 2;
  stats.from_cache = 40;
  stats.cache_bytes = 1000;
  server.SetPlanning(stats);
  stats.from_cache = 41;
  server.SetPlanning(stats);
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_plans_total{source=\"made\"} 2\n"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_plans_total{source=\"cache\"} 41\n"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_plan_cache_bytes 1000\n"));
}

TEST(ServerMetricsTest, LossesCountByWorkerAndReason) {
  Metrics metrics;
  ServerMetrics server(&metrics, Limits());
  server.SetTopology(With("a"));
  EXPECT_THAT(metrics.Text(),
              HasSubstr("ringattn_worker_losses_total{reason=\"silent\",worker=\"a\"} 0"));
  server.WorkerLost(Loss("a", LossReason::kSilent));
  server.WorkerLost(Loss("a", LossReason::kSilent));
  server.WorkerLost(Loss("b", LossReason::kStuck));  // joined and left between two topologies
  EXPECT_THAT(metrics.Text(),
              HasSubstr("ringattn_worker_losses_total{reason=\"silent\",worker=\"a\"} 2"));
  EXPECT_THAT(metrics.Text(),
              HasSubstr("ringattn_worker_losses_total{reason=\"stuck\",worker=\"b\"} 1"));
}

TEST(ServerMetricsTest, WorkerNamesInLabelsAreBounded) {
  Metrics metrics;
  ServerMetrics server(&metrics, Limits());
  constexpr int kNames = 3 * ServerMetrics::kMaxWorkerNames;
  for (int i = 0; i < kNames; ++i) {
    server.SetTopology(With(absl::StrCat("pod-", i)));
    server.WorkerLost(Loss(absl::StrCat("pod-", i), LossReason::kDisconnected));
  }
  EXPECT_EQ(SeriesOf(metrics, "ringattn_worker_losses_total"),
            (ServerMetrics::kMaxWorkerNames + 1) * std::size(kLossReasons));
  EXPECT_THAT(metrics.Text(), HasSubstr(absl::StrCat("reason=\"disconnected\",worker=\"other\"} ",
                                                     kNames - ServerMetrics::kMaxWorkerNames)));
}

TEST(ServerMetricsTest, SeriesExistBeforeTheFirstRequest) {
  Metrics metrics;
  ServerMetrics server(&metrics, Limits());
  EXPECT_THAT(metrics.Text(),
              HasSubstr("ringattn_requests_total{code=\"ABORTED\",method=\"Backward\"} 0"));
  server.RequestEnded(Direction::kBackward, "ABORTED");
  server.Served(Direction::kForward, 4096);
  EXPECT_THAT(metrics.Text(),
              HasSubstr("ringattn_requests_total{code=\"ABORTED\",method=\"Backward\"} 1"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_request_tokens_total{method=\"Forward\"} 4096"));
}

TEST(ServerMetricsTest, HostsOfTheRingAreCounted) {
  Metrics metrics;
  ServerMetrics server(&metrics, Limits());
  v1::Topology topology;
  for (const char* host : {"a", "a", "b", "c"}) {
    v1::WorkerInfo* worker = topology.add_workers();
    worker->mutable_location()->set_host(host);
    if (*host == 'c') continue;  // in no ring
    worker->set_rank(topology.workers_size() - 1);
    worker->set_host_link_bytes_per_second(*host == 'a' ? 3e9 : 0);
  }
  topology.mutable_workers(1)->set_host_link_bytes_per_second(2e9);
  topology.mutable_workers(0)->set_host_total_bytes_per_second(4e9);
  server.SetTopology(topology);
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_ring_hosts 2\n"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_ring_host_total_bytes_per_second 4000000000\n"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_ring_host_link_bytes_per_second 2000000000\n"));
  server.SetTopology(v1::Topology());
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_ring_hosts 0\n"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_ring_host_link_bytes_per_second 0\n"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_ring_host_total_bytes_per_second 0\n"));
}

TEST(ServerMetricsTest, StatsBecomeGauges) {
  Metrics metrics;
  ServerMetrics server(&metrics, Limits());
  CoordinatorStats stats;
  stats.ready_workers = 3;
  stats.connected_workers = 4;
  stats.parted_workers = 2;
  server.SetStats(stats);
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_ring_members 3"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_connected_workers 4"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_parted_workers 2"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_max_queued_requests 256"));
}

}  // namespace
}  // namespace ringattn::server

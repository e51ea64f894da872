#include "server/edge/status/status_json.h"

#include <string>

#include <nlohmann/json.hpp>

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1'700'000'000);

StatusConstants Constants() { return {"1.2.3", kNow - absl::Hours(1), Limits()}; }

ServerStatus Example() {
  ServerStatus status;
  CoordinatorSnapshot& core = status.core;
  core.when = kNow - absl::Milliseconds(100);
  core.ring_state = v1::RING_STATE_READY;
  core.generation = 7;
  WorkerSnapshot& worker = core.workers.emplace_back();
  worker.info.set_name("worker-0");
  worker.info.set_rank(0);
  v1::WorkerLocation* location = worker.info.mutable_location();
  location->set_host("node-a");
  location->set_zone("rack-1");
  location->set_slot(7);
  v1::NetworkInterface* interface = location->add_interfaces();
  interface->set_name("eth0");
  interface->add_addresses("10.0.0.1");
  worker.info.set_host_link_bytes_per_second(5e9);
  worker.info.set_host_total_bytes_per_second(2e10);
  worker.info.set_next_transport("wire");
  worker.info.set_state(v1::WORKER_STATE_READY);
  worker.info.set_memory_bytes(1000);
  worker.info.set_reserved_bytes(250);
  worker.info.set_kv_caches(2);
  worker.info.set_kv_cache_bytes(100);
  core.kv_caches.caches = 2;
  core.kv_caches.open = 1;
  core.kv_caches.bytes = 100;
  worker.silence = absl::Milliseconds(400);
  core.workers.emplace_back().info.set_name("newcomer");
  core.requests_by_stage[static_cast<size_t>(RequestStage::kUploading)] = 1;
  core.requests_by_stage[static_cast<size_t>(RequestStage::kQueued)] = 5;
  RequestSnapshot& request = core.requests.emplace_back();
  request.request_id = "mine";
  request.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  request.stage = RequestStage::kUploading;
  request.arrived_at = kNow - absl::Seconds(3);
  request.deadline = kNow + absl::Minutes(1);
  request.query_tokens = 4096;
  request.members = {"worker-0"};
  status.transfers.push_back({.received_bytes = 30, .bytes_up = 120});
  LostWorker loss;
  loss.when = kNow - absl::Minutes(2);
  loss.worker = "worker-1";
  loss.rank = 1;
  loss.reason = LossReason::kSilent;
  loss.detail = "silent for 5s";
  loss.ended_requests = 2;
  core.losses.push_back(loss);
  return status;
}

TEST(StatusJsonTest, ListsWorkersAndRequests) {
  const auto json = nlohmann::json::parse(StatusJson(Constants(), Example(), kNow));
  EXPECT_EQ(json["version"], "1.2.3");
  EXPECT_EQ(json["uptime_seconds"], 3600);
  EXPECT_NEAR(json["age_seconds"].get<double>(), 0.1, 1e-6);
  EXPECT_EQ(json["ring"]["state"], "ready");
  EXPECT_EQ(json["ring"]["members"], 1);
  EXPECT_EQ(json["ring"]["workers"], 2);
  EXPECT_EQ(json["ring"]["hosts"], 1);
  EXPECT_EQ(json["workers"][0]["host"], "node-a");
  EXPECT_EQ(json["workers"][0]["zone"], "rack-1");
  EXPECT_EQ(json["workers"][0]["slot"], 7);
  EXPECT_TRUE(json["workers"][1]["slot"].is_null());
  EXPECT_EQ(json["workers"][0]["interfaces"][0]["name"], "eth0");
  EXPECT_EQ(json["workers"][0]["interfaces"][0]["addresses"][0], "10.0.0.1");
  EXPECT_EQ(json["workers"][0]["host_link_bytes_per_second"], 5e9);
  EXPECT_EQ(json["workers"][0]["host_total_bytes_per_second"], 2e10);
  EXPECT_EQ(json["workers"][0]["next_transport"], "wire");
  EXPECT_EQ(json["workers"][0]["parted_from"].size(), 0u);
  EXPECT_EQ(json["memory"]["reserved_bytes"], 250);
  EXPECT_EQ(json["kv_caches"]["caches"], 2);
  EXPECT_EQ(json["kv_caches"]["open"], 1);
  EXPECT_EQ(json["kv_caches"]["bytes"], 100);
  EXPECT_EQ(json["kv_caches"]["max_caches"], Limits().max_kv_caches);
  EXPECT_EQ(json["workers"][0]["kv_caches"], 2);
  EXPECT_EQ(json["workers"][0]["kv_cache_bytes"], 100);
  EXPECT_EQ(json["workers"][0]["rank"], 0);
  EXPECT_TRUE(json["workers"][1]["rank"].is_null());
  EXPECT_EQ(json["requests_in_flight"], 6);
  EXPECT_EQ(json["stages"]["queued"], 5);
  EXPECT_EQ(json["requests"][0]["stage"], "uploading");
  EXPECT_EQ(json["requests"][0]["done"], 0.25);
  EXPECT_EQ(json["requests"][0]["trace_id"], "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(json["requests"][0]["deadline_seconds"], 60.1);
  EXPECT_EQ(json["losses"][0]["reason"], "silent");
  EXPECT_EQ(json["losses"][0]["rank"], 1);
  EXPECT_EQ(json["losses"][0]["ended_requests"], 2);
}

TEST(StatusJsonTest, ExternalTextIsEscaped) {
  ServerStatus status = Example();
  status.core.requests[0].request_id = "</script><b>\"\\\x01";
  status.core.losses[0].detail = "\xff not UTF-8";
  const auto json = nlohmann::json::parse(StatusJson(Constants(), status, kNow));
  EXPECT_EQ(json["requests"][0]["request_id"], "</script><b>\"\\\x01");
  EXPECT_EQ(json["losses"][0]["detail"], "\xEF\xBF\xBD not UTF-8");
}

TEST(StatusJsonTest, SizeIsBoundedForAnyText) {
  ServerStatus status = Example();
  const std::string endless(1 << 20, 'x');
  RequestSnapshot request = status.core.requests[0];
  request.request_id = endless;
  request.principal = endless;
  request.members.assign(64, "worker-of-the-usual-length-00");
  const StatusBoardOptions options;
  status.core.requests.assign(options.max_requests, request);
  status.core.workers[0].info.set_name(endless);
  status.core.workers[0].info.set_device(endless);
  for (int i = 0; i < 1000; ++i) status.core.workers[0].info.add_parted_from("a-host");
  status.core.workers.assign(1000, status.core.workers[0]);
  status.core.losses[0].detail = endless;
  status.core.losses.assign(32, status.core.losses[0]);
  EXPECT_LT(StatusJson(Constants(), status, kNow).size(), 400u << 10);
}

}  // namespace
}  // namespace ringattn::server

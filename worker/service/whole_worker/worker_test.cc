// Whole workers with a fake coordinator: every message of one operation and of its exchange, in
// success and failure. worker_membership_test.cc has the messages of rings.
#include "worker/service/worker.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/wire/durations.h"
#include "common/wire/open_metadata.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/service/descriptor_shares.h"
#include "worker/testing/cluster.h"

namespace ringattn::worker {
namespace {

using Message = v1::JoinRequest;
using testing::HasSubstr;

TEST(DescriptorSharesTest, AQuarterRemains) {
  for (const int64_t limit : {256, 300, 1024, 4096, 1 << 20}) {
    const DescriptorShares shares = ShareDescriptors(limit);
    EXPECT_LE(shares.client_connections, limit / 2);
    EXPECT_LE(shares.client_connections + shares.local_sockets + shares.data_connections,
              limit * 3 / 4);
  }
  EXPECT_EQ(ShareDescriptors(1 << 20).client_connections, 1024);
  EXPECT_EQ(ShareDescriptors(1 << 20).local_sockets, 512 + 64);
}

TEST(Worker, RegistersItsProperties) {
  Cluster cluster(1, {.memory_limit_bytes = 12345,
                      .threads = 3,
                      .kernel_rates = {{"simt", {DType::kFloat32}, Direction::kForward, 5e9}},
                      .call_overhead_seconds = 2e-5});
  const auto registration = cluster.coordinator().WaitForWorker("worker-0", absl::Seconds(20));
  ASSERT_TRUE(registration.has_value());
  EXPECT_EQ(registration->device(), "scalar");
  EXPECT_EQ(registration->memory_bytes(), 12345u);
  EXPECT_EQ(registration->threads(), 3u);
  ASSERT_EQ(registration->kernel_rates_size(), 1);
  EXPECT_EQ(registration->kernel_rates(0).family(), "simt");
  EXPECT_EQ(registration->kernel_rates(0).flops_per_second(), 5e9);
  EXPECT_EQ(ToSeconds(registration->call_overhead()), 2e-5);
  EXPECT_EQ(registration->data_address(), cluster.worker(0).data_address());
  EXPECT_FALSE(registration->incarnation().empty());
}

TEST(Worker, ReportsRingMeasurement) {
  for (int world_size : {1, 2, 3}) {
    Cluster cluster(world_size);
    for (const v1::Committed& committed : cluster.Form(1)) {
      EXPECT_EQ(committed.link_bytes_per_second() > 1e5, world_size > 1);
      EXPECT_EQ(ToSeconds(committed.exchange_overhead()) > 0, world_size > 1);
      EXPECT_LT(ToSeconds(committed.exchange_overhead()), 5);
    }
  }
}

TEST(Worker, ComputesARequestFromReserveToRelease) {
  for (int world_size : {1, 2, 3}) {
    Cluster cluster(world_size);
    cluster.Form(1);
    const TestRequest request = TestRequest::Make(61, world_size);
    cluster.RunToTheEnd(request, "1-1", 1);
    cluster.RunToTheEnd(request, "1-2", 1);
    ExpectAllFree(cluster);
    EXPECT_THAT(cluster.worker(0).metrics().Text(),
                HasSubstr("ringattn_worker_runs_total{code=\"OK\"} 2"));
    EXPECT_TRUE(cluster.stuck().empty());
  }
}

// Waking links takes time, which passes while the upload notices reach the coordinator.
TEST(Worker, WakesLinksAfterUploadAndBeforeRun) {
  Cluster cluster(2);
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(61, 2);
  cluster.Reserve(request, "1-1", 1);
  for (int rank : {0, 1}) EXPECT_EQ(cluster.woken(rank), 0);
  const auto exchanges = cluster.UploadAll(request, "1-1", 1);
  const absl::Time patience = absl::Now() + absl::Seconds(10);
  const auto all_woken = [&cluster](int count) {
    return cluster.woken(0) == count && cluster.woken(1) == count;
  };
  while (!all_woken(1) && absl::Now() < patience) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(all_woken(1));
  cluster.SendRun("1-1", 1);
  for (const v1::Finished& finished : cluster.AwaitFinished()) EXPECT_TRUE(finished.ok());
  EXPECT_TRUE(all_woken(2));
}

TEST(Worker, HandlesFewerTokensThanRanks) {
  Cluster cluster(4);
  cluster.Form(1);
  for (int64_t tokens : {0, 1, 3}) {
    cluster.RunToTheEnd(TestRequest::Make(tokens, 4), absl::StrCat("1-", tokens), 1);
  }
}

TEST(Worker, ReportsTimesTilesAndTimeline) {
  Cluster cluster(2);
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(64, 2);
  cluster.Reserve(request, "1-1", 1);
  auto exchanges = cluster.UploadAll(request, "1-1", 1);
  cluster.SendRun("1-1", 1);
  const auto finished = cluster.AwaitFinished();
  for (int rank = 0; rank < 2; ++rank) {
    const v1::RankReport& report = finished[rank].report();
    EXPECT_EQ(report.worker(), Cluster::Name(rank));
    EXPECT_GT(ToSeconds(report.compute_time()), 0);
    EXPECT_GT(report.tiles(), 0u);
    EXPECT_GT(report.sent_bytes(), 0u);
    ASSERT_GT(report.timeline_size(), 2);
    EXPECT_EQ(report.timeline(0).name(), "upload");
    ASSERT_EQ(report.kernels_size(), 1);
    const v1::KernelUse& kernel = report.kernels(0);
    EXPECT_EQ(kernel.call(), "forward");
    EXPECT_EQ(kernel.family(), "scalar");
    EXPECT_EQ(kernel.kernel_class(), "plain");
    uint64_t named = 0;
    for (const v1::TimelineEvent& bar : report.timeline()) {
      const bool forward = absl::StrContains(bar.name(), "forward");
      EXPECT_EQ(bar.kernel_family(), forward ? "scalar" : "") << bar.name();
      EXPECT_EQ(bar.kernel_class(), forward ? "plain" : "");
      named += forward;
    }
    EXPECT_EQ(kernel.calls(), named);
    EXPECT_GT(named, 0u);
  }
}

// The program starts while inputs are being copied to the device, and outputs are sent while they
// are being copied from it.
TEST(Worker, StagingDoesNotChangeTheResult) {
  Cluster cluster(2);
  for (int rank = 0; rank < 2; ++rank) {
    cluster.device(rank).SetStaged(absl::Milliseconds(2), 4096);
  }
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(300, 2);
  cluster.RunToTheEnd(request, "1-1", 1);

  cluster.Reserve(request, "1-2", 1);
  auto exchanges = cluster.UploadAll(request, "1-2", 1);
  cluster.SendRun("1-2", 1);
  for (const v1::Finished& finished : cluster.AwaitFinished()) {
    double copied = 0, computed = 1e9;
    for (const v1::TimelineEvent& bar : finished.report().timeline()) {
      if (bar.category() == v1::TIMELINE_CATEGORY_H2D) copied = ToSeconds(bar.end());
      if (bar.category() == v1::TIMELINE_CATEGORY_COMPUTE) {
        computed = std::min(computed, ToSeconds(bar.begin()));
      }
    }
    EXPECT_GT(copied, 0.0);
    EXPECT_GE(computed, copied) << "computed on inputs that were not there";
  }
  exchanges.clear();
  cluster.Release("1-2", 1);
  ExpectAllFree(cluster);
  EXPECT_THAT(cluster.worker(0).metrics().Text(),
              HasSubstr("ringattn_stage_duration_seconds_count{stage=\"h2d\"} 2"));
  EXPECT_THAT(cluster.worker(0).metrics().Text(),
              HasSubstr("ringattn_stage_duration_seconds_count{stage=\"d2h\"} 1"));
}

// Cancels 20 downloads that have chunks in flight. Nothing may remain of them.
void CancelDownloads(Cluster& cluster) {
  const TestRequest request = TestRequest::Make(300, 1);
  for (int round = 0; round < 20; ++round) {
    const std::string id = absl::StrCat("1-", round);
    cluster.Reserve(request, id, 1);
    auto exchanges = cluster.UploadAll(request, id, 1);
    cluster.SendRun(id, 1);
    cluster.AwaitFinished();
    exchanges[0]->Cancel();
    cluster.Release(id, 1);
  }
  ExpectAllFree(cluster);
}

TEST(Worker, DownloadCancelledDuringCopyReturnsMemory) {
  Cluster cluster(1);
  cluster.device(0).SetStaged(absl::Milliseconds(1), 0);
  cluster.Form(1);
  CancelDownloads(cluster);
}

TEST(Worker, RejectsOversizedReserveWithTheFigures) {
  Cluster cluster(1, {.memory_limit_bytes = 1000});
  cluster.Form(1);
  v1::JoinResponse message;
  v1::Reserve* reserve = message.mutable_reserve();
  reserve->set_operation_id("1-1");
  reserve->set_generation(1);
  reserve->add_members(0);
  reserve->mutable_shape()->set_batch(1);
  reserve->mutable_shape()->set_seq_len_q(1000);
  reserve->mutable_shape()->set_seq_len_kv(1000);
  for (auto set : {&v1::AttentionShape::set_num_heads, &v1::AttentionShape::set_num_kv_heads,
                   &v1::AttentionShape::set_head_dim, &v1::AttentionShape::set_head_dim_v}) {
    (reserve->mutable_shape()->*set)(1);
  }
  reserve->set_dtype(v1::DATA_TYPE_FLOAT32);
  reserve->set_layout(v1::LAYOUT_CONTIGUOUS);
  reserve->set_schedule(v1::SCHEDULE_SINGLE);
  cluster.coordinator().Send("worker-0", message);
  auto reserved = cluster.coordinator().Await("worker-0", Message::kReserved);
  ASSERT_TRUE(reserved.has_value());
  EXPECT_FALSE(reserved->reserved().ok());
  EXPECT_THAT(reserved->reserved().reason(), HasSubstr("limit 1000"));

  // The kernels' workspace counts: buffers of 5 x 4 bytes would fit.
  cluster.device(0).SetStaged(absl::ZeroDuration(), 1000);
  reserve->mutable_shape()->set_seq_len_q(1);
  reserve->mutable_shape()->set_seq_len_kv(1);
  cluster.coordinator().Send("worker-0", message);
  reserved = cluster.coordinator().Await("worker-0", Message::kReserved);
  ASSERT_TRUE(reserved.has_value());
  EXPECT_FALSE(reserved->reserved().ok());
  EXPECT_FALSE(reserved->reserved().malformed());  // more memory would help
  EXPECT_THAT(reserved->reserved().reason(), HasSubstr("a kernel workspace of 1000 bytes"));
  EXPECT_EQ(reserved->reserved().workspace_bytes(), 1000u);

  reserve->mutable_shape()->set_seq_len_q(uint64_t{1} << 62);
  cluster.coordinator().Send("worker-0", message);
  reserved = cluster.coordinator().Await("worker-0", Message::kReserved);
  ASSERT_TRUE(reserved.has_value());
  EXPECT_TRUE(reserved->reserved().malformed());
  EXPECT_THAT(reserved->reserved().reason(), HasSubstr("malformed Reserve: shape."));
}

TEST(Worker, ExchangeRejectsInvalidMessages) {
  Cluster cluster(1);
  cluster.Form(3);
  const TestRequest request = TestRequest::Make(40, 1);
  const std::string address = cluster.worker(0).data_address();
  int next = 0;
  // Reserves an operation, opens its stream and returns how the stream ends after `send`.
  const auto ending = [&](auto send) {
    const std::string id = absl::StrCat("3-", ++next);
    cluster.Reserve(request, id, 3);
    TestExchange exchange(address);
    EXPECT_TRUE(exchange.Open(id, 3).ok());
    send(exchange);
    const absl::Status status = exchange.Finish();
    cluster.Release(id, 3);
    return status;
  };
  const std::string four(4, 'x');

  EXPECT_EQ(TestExchange(address, "guess").Open("3-1", 3).code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(TestExchange(address).Open("nobody", 3).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(TestExchange(address).Open("3-1", 3, (16u << 20) + 1).code(),
            absl::StatusCode::kInvalidArgument);
  const int64_t q_bytes = request.MapOf(TensorId::kQ).local_bytes(0);
  absl::Status status = ending([&](auto& e) { e.SendChunk(TensorId::kQ, q_bytes - 3, four); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("q: "));
  status = ending([&](auto& e) { e.SendChunk(TensorId::kQ, ~uint64_t{0} - 1, four); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  status = ending([&](auto& e) {
    e.SendChunk(TensorId::kQ, 8, four);
    e.SendChunk(TensorId::kQ, 6, four);
  });
  EXPECT_THAT(status.message(), HasSubstr("overlap bytes"));
  status = ending([&](auto& e) { e.SendChunk(TensorId::kDout, 0, four); });
  EXPECT_THAT(status.message(), HasSubstr("not an input"));
  status = ending([&](auto& e) { e.SendChunk(static_cast<TensorId>(77), 0, four); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  status = ending([&](auto& e) { e.Send(v1::ExchangeRequest()); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("only chunks"));
  status = ending([&](auto& e) { e.SendChunk(TensorId::kK, 0, four, 123u); });
  EXPECT_THAT(status.message(), HasSubstr("crc32c"));
  status = ending([&](auto& e) { e.SendChunk(TensorId::kQkv, 0, four); });
  EXPECT_THAT(status.message(), HasSubstr("not an input"));  // the request is not packed
  // A stale generation, and a second stream for one operation.
  cluster.Reserve(request, "3-again", 3);
  EXPECT_EQ(TestExchange(address).Open("3-again", 2).code(), absl::StatusCode::kNotFound);
  TestExchange first(address);
  ASSERT_TRUE(first.Open("3-again", 3).ok());
  EXPECT_EQ(TestExchange(address).Open("3-again", 3).code(), absl::StatusCode::kInvalidArgument);
  // Released while the stream is open.
  cluster.Release("3-again", 3);
  EXPECT_EQ(first.Finish().code(), absl::StatusCode::kAborted);
  ExpectAllFree(cluster);
}

TEST(Worker, ExchangeNeedsValidMetadata) {
  Cluster cluster(1);
  cluster.Form(3);
  const TestRequest request = TestRequest::Make(40, 1);
  cluster.Reserve(request, "3-1", 3);
  const auto refused = [&](const TestExchange::Metadata& metadata,
                           const std::string& secret = kTestSecret) {
    return TestExchange(cluster.worker(0).data_address(), secret).OpenWith(metadata);
  };
  const char* const key = wire::kOpenShardMetadataKey;
  v1::OpenShard open;
  open.set_operation_id("3-1");
  open.set_generation(3);
  const std::string right = open.SerializeAsString();
  open.set_token(std::string(1024, 'x'));
  for (const TestExchange::Metadata& metadata : {TestExchange::Metadata{},
                                                 {{key, right.substr(0, right.size() - 1)}},
                                                 {{key, right}, {key, right}},
                                                 {{key, open.SerializeAsString()}}}) {
    const absl::Status status = refused(metadata);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(key));
    // A caller without the secret does not learn what is wrong.
    EXPECT_EQ(refused(metadata, "guess").code(), absl::StatusCode::kUnauthenticated);
  }
  EXPECT_EQ(refused({{key, right}}, "guess").code(), absl::StatusCode::kUnauthenticated);
  // None of them occupies the operation's only stream.
  TestExchange exchange(cluster.worker(0).data_address());
  EXPECT_TRUE(exchange.OpenWith({{key, right}}).ok());
  cluster.Release("3-1", 3);
  EXPECT_EQ(exchange.Finish().code(), absl::StatusCode::kAborted);
  ExpectAllFree(cluster);
}

TEST(Worker, CancelFreesDevicesAndKeepsRing) {
  Cluster cluster(2);
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(64, 2);
  for (int round = 0; round < 3; ++round) {
    for (int rank : {0, 1}) cluster.device(rank).SetDelay(absl::Seconds(60));
    const std::string id = absl::StrCat("1-", round);
    cluster.Reserve(request, id, 1);
    auto exchanges = cluster.UploadAll(request, id, 1);
    cluster.SendRun(id, 1);
    absl::SleepFor(absl::Milliseconds(50));
    const absl::Time begin = absl::Now();
    cluster.SendCancel(id, 1);
    for (const v1::Finished& finished : cluster.AwaitFinished()) {
      EXPECT_FALSE(finished.ok());
      EXPECT_TRUE(finished.cancelled());
    }
    EXPECT_LT(absl::Now() - begin, absl::Seconds(15));  // far below the total of a minute
    cluster.Release(id, 1);
    for (auto& exchange : exchanges) {
      EXPECT_EQ(exchange->Finish().code(), absl::StatusCode::kAborted);
    }
    for (int rank : {0, 1}) cluster.device(rank).SetDelay(absl::ZeroDuration());
    cluster.RunToTheEnd(request, absl::StrCat("after-", round), 1);
  }
  ExpectAllFree(cluster);
}

TEST(Worker, ThousandCancelledOperationsLeaveNothing) {
  Cluster cluster(2);
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(8, 2);
  for (int i = 0; i < 1000; ++i) {
    const std::string id = absl::StrCat("1-", i);
    cluster.Reserve(request, id, 1);
    cluster.SendCancel(id, 1);
    cluster.Release(id, 1);
  }
  ExpectAllFree(cluster);
  cluster.RunToTheEnd(request, "last", 1);
}

TEST(Worker, CancelledDownloadReturnsMemory) {
  Cluster cluster(1);
  cluster.Form(1);
  CancelDownloads(cluster);
}

}  // namespace
}  // namespace ringattn::worker

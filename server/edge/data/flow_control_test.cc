// Tests of the server's data flow, its memory bounds and the size of its chunks.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "common/security/credentials.h"
#include "common/wire/crc32c.h"
#include "common/wire/transport.h"
#include "gtest/gtest.h"
#include "server/edge/data/coordinator_relay.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

constexpr int kQ = 1, kK = 2, kV = 3;

// Bytes in flight in HTTP/2 on each side of the server: a stream's window, the rest of the message
// that a reader waits for, and the message being written. With gRPC's automatic windows it would
// exceed 9 MiB.
constexpr int64_t kTransportBytes = 2 * (wire::kStreamWindowBytes + kMiB) + 2 * kMiB;

v1::ForwardHeader MakeHeader(uint64_t sq, uint64_t sk, uint32_t heads, uint32_t dim) {
  v1::ForwardHeader header;
  v1::AttentionShape* shape = header.mutable_shape();
  shape->set_batch(1);
  shape->set_seq_len_q(sq);
  shape->set_seq_len_kv(sk);
  shape->set_num_heads(heads);
  shape->set_head_dim(dim);
  header.set_dtype(v1::DATA_TYPE_FLOAT32);
  return header;
}

uint64_t BytesOf(const v1::ForwardHeader& header, int tensor) {
  const v1::AttentionShape& shape = header.shape();
  const uint64_t rows = tensor == kQ ? shape.seq_len_q() : shape.seq_len_kv();
  return rows * shape.num_heads() * shape.head_dim() * 4;
}

// One Forward call through the blocking stub.
struct Call {
  explicit Call(TestCluster* cluster, v1::ForwardHeader with) : header(std::move(with)) {
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream = cluster->attention->Forward(&context);
    v1::ForwardRequest request;
    *request.mutable_header() = header;
    stream->Write(request);
  }

  bool ReadAccepted() {
    v1::ForwardResponse response;
    return stream->Read(&response) && response.has_accepted();
  }

  void Upload(uint64_t chunk_bytes = kMiB, std::atomic<int64_t>* written = nullptr) {
    for (int tensor : {kQ, kK, kV}) {
      const uint64_t bytes = BytesOf(header, tensor);
      for (uint64_t at = 0; at < bytes; at += chunk_bytes) {
        v1::ForwardRequest request;
        v1::TensorChunk* chunk = request.mutable_chunk();
        chunk->set_tensor(static_cast<v1::TensorId>(tensor));
        chunk->set_offset(at);
        chunk->set_data(Pattern(tensor, at, std::min(chunk_bytes, bytes - at)));
        if (!stream->Write(request)) return;
        if (written != nullptr) *written += chunk->data().size();
      }
    }
    stream->WritesDone();
  }

  // Reads to the end. Every output byte must arrive once, in order and with the right value.
  grpc::Status ReadAll() {
    v1::ForwardResponse response;
    std::map<int, uint64_t> next;
    while (stream->Read(&response)) {
      EXPECT_FALSE(has_summary) << "something follows the summary";
      if (response.has_accepted()) accepted = response.accepted();
      has_summary = response.has_summary();
      if (!response.has_chunk()) continue;
      const v1::TensorChunk& chunk = response.chunk();
      EXPECT_EQ(chunk.offset(), next[chunk.tensor()]);
      EXPECT_EQ(chunk.data(), Pattern(chunk.tensor(), chunk.offset(), chunk.data().size()));
      if (chunk.has_crc32c()) {
        ++crcs;
        EXPECT_EQ(chunk.crc32c(), wire::Crc32c(chunk.data().data(), chunk.data().size()));
      }
      next[chunk.tensor()] += chunk.data().size();
      chunk_sizes[chunk.tensor()].push_back(chunk.data().size());
    }
    const grpc::Status status = stream->Finish();
    if (status.ok()) {
      EXPECT_TRUE(has_summary);
      const uint64_t rows = header.shape().seq_len_q() * header.shape().num_heads();
      EXPECT_EQ(next[v1::TENSOR_ID_OUT], rows * header.shape().head_dim() * 4);
      EXPECT_EQ(next[v1::TENSOR_ID_LSE], rows * 4);
    }
    return status;
  }

  v1::ForwardHeader header;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ForwardRequest, v1::ForwardResponse>> stream;
  v1::Accepted accepted;
  bool has_summary = false;
  int crcs = 0;
  std::map<int, std::vector<size_t>> chunk_sizes;
};

void ExpectSmallRequestRuns(TestCluster* cluster) {
  Call call(cluster, MakeHeader(64, 64, 2, 8));
  call.Upload();
  const grpc::Status status = call.ReadAll();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

// Returns the value once it has been stable for a while. Later changes only weaken the test.
template <typename Value>
int64_t Settled(const Value& value) {
  int64_t last = value();
  absl::Time since = absl::Now();
  while (absl::Now() - since < absl::Milliseconds(250)) {
    absl::SleepFor(absl::Milliseconds(20));
    if (value() == last) continue;
    last = value();
    since = absl::Now();
  }
  return last;
}

TEST(FlowControlTest, BackPressureReachesTheClientOfAnUpload) {
  TestCluster cluster(2);
  for (auto& worker : cluster.workers) worker->SetUploadGate(false);
  Call call(&cluster, MakeHeader(128 * 1024, 1, 2, 128));  // q has 128 MiB
  ASSERT_TRUE(call.ReadAccepted());
  std::atomic<int64_t> written = 0;
  std::thread uploader([&] { call.Upload(kMiB, &written); });
  EXPECT_TRUE(WaitUntil([&] { return written >= CoordinatorRelay::kUploadWindowBytes; }));
  const int64_t in_flight = Settled([&] { return written.load(); });
  EXPECT_LE(in_flight, CoordinatorRelay::kUploadWindowBytes + kMiB + kTransportBytes);
  RecordProperty("upload_in_flight_bytes", std::to_string(in_flight));
  for (auto& worker : cluster.workers) worker->SetUploadGate(true);
  uploader.join();
  const grpc::Status status = call.ReadAll();
  EXPECT_TRUE(status.ok()) << status.error_message();
  for (auto& worker : cluster.workers) EXPECT_EQ(worker->wrong_bytes(), 0);
  EXPECT_TRUE(cluster.WaitIdle());
}

TEST(FlowControlTest, ASlowMemberStallsOnlyItsRequest) {
  TestCluster cluster(2);
  cluster.workers[0]->SetUploadGate(false);
  cluster.workers[1]->SetUploadGate(false);
  Call stuck(&cluster, MakeHeader(16 * 1024, 1, 2, 128));
  ASSERT_TRUE(stuck.ReadAccepted());
  std::thread uploader([&] { stuck.Upload(); });
  // Only members without the stuck request serve the next one.
  int holder = cluster.workers[0]->held_operations() == 1 ? 0 : 1;
  cluster.workers[1 - holder]->SetUploadGate(true);
  for (int i = 0; i < 5; ++i) ExpectSmallRequestRuns(&cluster);
  cluster.workers[holder]->SetUploadGate(true);
  uploader.join();
  EXPECT_TRUE(stuck.ReadAll().ok());
}

// Limits for an idle client and an idle member.
std::unique_ptr<TestCluster> ClusterOfTwo(absl::Duration idle, absl::Duration transfer_timeout) {
  return std::make_unique<TestCluster>(2, [=](ServerOptions* options) {
    options->core.limits.upload_idle_timeout = idle;
    options->core.limits.download_idle_timeout = idle;
    options->core.transfer_timeout = transfer_timeout;
  });
}

v1::ForwardHeader MakeRingHeader(uint64_t tokens) {
  v1::ForwardHeader header = MakeHeader(tokens, 1, 2, 128);
  header.mutable_plan()->set_schedule(v1::SCHEDULE_RING);
  header.mutable_plan()->set_world_size(2);
  return header;
}

void ExpectLost(const grpc::Status& status, const std::string& worker, const std::string& why) {
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED) << status.error_message();
  EXPECT_NE(status.error_message().find(worker), std::string::npos) << status.error_message();
  EXPECT_NE(status.error_message().find(why), std::string::npos) << status.error_message();
  EXPECT_NE(status.error_details().find("WORKER_LOST"), std::string::npos);
  EXPECT_NE(status.error_details().find("RetryInfo"), std::string::npos);
}

// The transport absorbs less than the whole upload.
TEST(FlowControlTest, AMemberThatTakesNothingIsLost) {
  for (uint64_t tokens : {uint64_t{512}, uint64_t{32 * 1024}}) {
    const auto cluster = ClusterOfTwo(absl::Seconds(1), absl::Milliseconds(1500));
    cluster->workers[1]->SetUploadGate(false);
    Call call(cluster.get(), MakeRingHeader(tokens));
    ASSERT_TRUE(call.ReadAccepted());
    std::thread uploader([&] { call.Upload(); });
    ExpectLost(call.ReadAll(), "fake-1", "it took no bytes of its inputs for ");
    uploader.join();
  }
}

TEST(FlowControlTest, AClientThatWaitsForAMemberIsNotIdle) {
  const auto cluster = ClusterOfTwo(absl::Seconds(1), absl::Seconds(60));
  cluster->workers[1]->SetUploadGate(false);
  Call call(cluster.get(), MakeRingHeader(32 * 1024));
  ASSERT_TRUE(call.ReadAccepted());
  std::thread uploader([&] { call.Upload(); });
  // The idle limit of a client, from the moment that this client begins to wait.
  ASSERT_TRUE(WaitUntil([&] { return cluster->workers[0]->received_bytes() > 0; }));
  Call rests(cluster.get(), MakeRingHeader(64));
  ASSERT_TRUE(rests.ReadAccepted());
  EXPECT_EQ(rests.ReadAll().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  cluster->workers[1]->SetUploadGate(true);
  uploader.join();
  const grpc::Status status = call.ReadAll();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(FlowControlTest, AMemberThatSendsNothingIsLost) {
  // One second plus three times the client's limit.
  const auto cluster = std::make_unique<TestCluster>(2, [](ServerOptions* options) {
    options->core.limits.download_idle_timeout = absl::Milliseconds(600);
    options->core.transfer_timeout = absl::Seconds(1);
  });
  cluster->workers[0]->SetSendGate(false);
  Call call(cluster.get(), MakeRingHeader(32 * 1024));
  call.Upload();
  ExpectLost(call.ReadAll(), "fake-0", "it sent no bytes of its outputs for ");
}

TEST(FlowControlTest, BackPressureReachesTheWorkersOfADownload) {
  for (v1::Layout layout : {v1::LAYOUT_CONTIGUOUS, v1::LAYOUT_STRIPED}) {
    TestCluster cluster(2);
    v1::ForwardHeader header = MakeHeader(128 * 1024, 1, 2, 128);  // out has 128 MiB
    header.mutable_plan()->set_schedule(v1::SCHEDULE_RING);
    header.mutable_plan()->set_world_size(2);
    header.mutable_plan()->set_layout(layout);
    Call call(&cluster, header);
    call.Upload();
    const auto sent = [&] {
      return cluster.workers[0]->sent_bytes() + cluster.workers[1]->sent_bytes();
    };
    ASSERT_TRUE(WaitUntil([&] { return sent() > 0; }));
    const int64_t in_flight = Settled(sent);
    // Each member's stream has a transport window, in addition to the client's.
    EXPECT_LE(in_flight, CoordinatorRelay::kDownloadWindowBytes + 2 * kMiB +
                             2 * (CoordinatorRelay::kReadAheadBytes + kMiB) + kTransportBytes);
    RecordProperty("download_in_flight_bytes", std::to_string(in_flight));
    ExpectSmallRequestRuns(&cluster);
    const grpc::Status status = call.ReadAll();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(cluster.WaitIdle());
  }
}

TEST(FlowControlTest, RepliesHaveTheRequestedChunkSize) {
  TestCluster cluster(3);
  for (v1::Layout layout : {v1::LAYOUT_CONTIGUOUS, v1::LAYOUT_ZIGZAG, v1::LAYOUT_STRIPED}) {
    for (uint32_t max_chunk_bytes : {0u, 1024u, 5000u, 3u << 20, 16u << 20}) {
      v1::ForwardHeader header = MakeHeader(10001, 7, 2, 64);  // out has 5.1 MB
      if (max_chunk_bytes < 5000 && max_chunk_bytes > 0) header = MakeHeader(501, 7, 2, 32);
      header.mutable_plan()->set_schedule(v1::SCHEDULE_RING);
      header.mutable_plan()->set_world_size(3);
      header.mutable_plan()->set_layout(layout);
      header.mutable_reply()->set_with_crc32c(layout == v1::LAYOUT_ZIGZAG);
      if (max_chunk_bytes > 0) header.mutable_reply()->set_max_chunk_bytes(max_chunk_bytes);
      const size_t limit = max_chunk_bytes > 0 ? max_chunk_bytes : 1 << 20;
      Call call(&cluster, header);
      call.Upload(100'000);
      const grpc::Status status = call.ReadAll();
      ASSERT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(call.accepted.max_chunk_bytes_down(), limit);
      int chunks = 0;
      for (const auto& [tensor, sizes] : call.chunk_sizes) {
        chunks += static_cast<int>(sizes.size());
        for (size_t i = 0; i + 1 < sizes.size(); ++i) EXPECT_EQ(sizes[i], limit);
        EXPECT_LE(sizes.back(), limit);
      }
      EXPECT_EQ(call.crcs, layout == v1::LAYOUT_ZIGZAG ? chunks : 0);
    }
  }
}

TEST(FlowControlTest, ProgressIsSentOnRequest) {
  TestCluster cluster(1);
  cluster.workers[0]->SetRunGate(false);
  v1::ForwardHeader header = MakeHeader(100, 100, 1, 8);
  header.mutable_reply()->mutable_progress_interval()->set_nanos(50'000'000);
  Call call(&cluster, header);
  call.Upload();
  v1::ForwardResponse response;
  for (int seen = 0; seen < 3 && call.stream->Read(&response); seen += response.has_progress()) {
  }
  EXPECT_TRUE(response.has_progress());
  cluster.workers[0]->SetRunGate(true);
  EXPECT_TRUE(call.ReadAll().ok());
}

TEST(FlowControlTest, ADisconnectedClientFreesEverything) {
  TestCluster cluster(2);
  const uint64_t generation = cluster.topology().generation();
  for (int i = 0; i < 100; ++i) {
    v1::ForwardHeader header = MakeHeader(2000, 2000, 2, 64);
    header.mutable_plan()->set_schedule(v1::SCHEDULE_RING);
    header.mutable_plan()->set_world_size(2);
    Call call(&cluster, header);
    if (i % 4 > 0) {
      ASSERT_TRUE(call.ReadAccepted());
    }
    if (i % 4 > 1) call.Upload();
    v1::ForwardResponse response;
    if (i % 4 > 2) call.stream->Read(&response);
    call.context.TryCancel();
  }
  EXPECT_TRUE(cluster.WaitIdle());
  ExpectSmallRequestRuns(&cluster);
  EXPECT_EQ(cluster.topology().generation(), generation);
}

}  // namespace
}  // namespace ringattn::server

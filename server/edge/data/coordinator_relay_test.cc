// Tests of the relay's edge cases; flow_control_test covers its data flow.
#include "server/edge/data/coordinator_relay.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/layout/shard_plan.h"
#include "common/wire/chunk_codec.h"
#include "common/wire/grpc_slices.h"
#include "gtest/gtest.h"
#include "ringattn/v1/shard.grpc.pb.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

struct Listener final : TransferListener {
  void OnRoom() override {}
  void OnOutput(grpc::ByteBuffer, int64_t) override {}
  void OnDrained() override {}
  void OnMemberFailed(int rank, const std::string&) override { failed_rank = rank; }

  std::atomic<int> failed_rank = -1;
};

// A relay to one member, by default at an address where no process listens.
TransferSpec MakeSpec(int64_t rows = 1, const std::string& address = "127.0.0.1:1") {
  TransferSpec spec;
  AttentionShape& shape = spec.request.spec.shape;
  spec.request.spec.dtype = DType::kFloat32;
  shape.batch = shape.num_heads = shape.num_kv_heads = 1;
  shape.seq_len_q = shape.seq_len_kv = rows;
  shape.head_dim = shape.head_dim_v = 4;
  shape.cu_seqlens_q = shape.cu_seqlens_k = {0, rows};
  spec.request.inputs = {TensorId::kQ, TensorId::kK, TensorId::kV};
  spec.request.outputs = {TensorId::kOut, TensorId::kLse};
  spec.reply.max_chunk_bytes = kMiB;
  spec.accept.request_id = "test";
  spec.shards = MakeShardPlan(spec.request.spec, Layout::kContiguous, 1);
  spec.accept.members = {{1, "worker", address}};
  return spec;
}

// A member that sends its outputs immediately in small chunks: byte i of a tensor is i / 256.
class SendingMember final : public v1::ShardService::Service {
 public:
  static constexpr int64_t kChunkBytes = 4096;

  explicit SendingMember(int64_t rows) : rows_(rows) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~SendingMember() override {
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  }

  const std::string& address() const { return address_; }

  grpc::Status Exchange(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::ExchangeResponse, v1::ExchangeRequest>* stream) override {
    v1::ExchangeResponse response;
    response.mutable_opened();
    stream->Write(response);
    Send(v1::TENSOR_ID_OUT, rows_ * 16, stream);
    Send(v1::TENSOR_ID_LSE, rows_ * 4, stream);
    response.mutable_done();
    stream->Write(response);
    return grpc::Status::OK;
  }

 private:
  static void Send(v1::TensorId tensor, int64_t bytes,
                   grpc::ServerReaderWriter<v1::ExchangeResponse, v1::ExchangeRequest>* stream) {
    for (int64_t at = 0; at < bytes; at += kChunkBytes) {
      v1::ExchangeResponse response;
      v1::TensorChunk* chunk = response.mutable_chunk();
      chunk->set_tensor(tensor);
      chunk->set_offset(at);
      std::string data(std::min(kChunkBytes, bytes - at), '\0');
      for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>((at + i) / 256);
      chunk->set_data(std::move(data));
      if (!stream->Write(response)) return;
    }
  }

  const int64_t rows_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

// A client's stream that takes one output after the other with a delay, and reports it on another
// thread.
class SlowListener final : public TransferListener {
 public:
  ~SlowListener() override {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    if (thread_.joinable()) thread_.join();
  }
  void Start(CoordinatorRelay* relay) {
    thread_ = std::thread([this, relay] { Deliver(relay); });
  }

  void OnRoom() override {}
  void OnOutput(grpc::ByteBuffer message, int64_t payload_bytes) override {
    most_at_once_ = std::max(most_at_once_.load(), ++at_once_);
    absl::SleepFor(absl::Microseconds(300));
    const auto parsed = wire::ReceivedMessage::Parse(wire::kForwardResponse, message);
    if (!parsed.ok() || !parsed->is_chunk()) {
      ++wrong_;
    } else {
      uint64_t& next = parsed->chunk().tensor == v1::TENSOR_ID_OUT ? out_ : lse_;
      wrong_ += parsed->chunk().offset != next;
      for (const wire::Fragment& fragment : parsed->payload()) {
        for (size_t i = 0; i < fragment.size; ++i, ++next) {
          wrong_ += static_cast<const uint8_t*>(fragment.data)[i] != (next / 256) % 256;
        }
      }
    }
    --at_once_;
    absl::MutexLock lock(&mutex_);
    given_.push_back(payload_bytes);
  }
  void OnDrained() override { ++drained_; }
  void OnMemberFailed(int, const std::string&) override { ++failed_; }

  int drained() const { return drained_; }
  int failed() const { return failed_; }
  int wrong() const { return wrong_; }
  int most_at_once() const { return most_at_once_; }
  uint64_t out() const { return out_; }
  uint64_t lse() const { return lse_; }

 private:
  void Deliver(CoordinatorRelay* relay) {
    const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return stopping_ || !given_.empty();
    };
    while (true) {
      int64_t bytes = 0;
      {
        absl::MutexLock lock(&mutex_);
        mutex_.Await(absl::Condition(&ready));
        if (stopping_) return;
        bytes = given_.front();
        given_.pop_front();
      }
      relay->Delivered(bytes);
    }
  }

  std::atomic<int> drained_{0}, failed_{0}, wrong_{0}, at_once_{0}, most_at_once_{0};
  uint64_t out_ = 0, lse_ = 0;  // offset of OnOutput, which is called serially
  absl::Mutex mutex_;
  std::deque<int64_t> given_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// Outputs are moved by threads of the member, the client and the pool in turn, without losing,
// duplicating or reordering any.
TEST(CoordinatorRelayTest, OutputsStayInOrderAcrossThreads) {
  constexpr int64_t kRows = 100'000;  // 1.6 MB in chunks of 4 KiB
  SendingMember member(kRows);
  ShardChannels channels{Limits(), TransportSecurity()};
  const auto listener = std::make_shared<SlowListener>();
  TransferSpec spec = MakeSpec(kRows, member.address());
  spec.reply.max_chunk_bytes = SendingMember::kChunkBytes;
  const auto relay = std::make_shared<CoordinatorRelay>(std::move(spec), listener, Limits(),
                                                        &channels, kTestSecret);
  listener->Start(relay.get());
  EXPECT_FALSE(relay->Open().has_value());
  relay->Drain();
  EXPECT_TRUE(WaitUntil([&] { return listener->drained() > 0 || listener->failed() > 0; }));
  EXPECT_EQ(listener->failed(), 0);
  EXPECT_EQ(listener->wrong(), 0);
  EXPECT_EQ(listener->most_at_once(), 1);
  EXPECT_EQ(listener->out(), kRows * 16u);
  EXPECT_EQ(listener->lse(), kRows * 4u);
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(listener->drained(), 1);
  relay->Stop();
}

TEST(CoordinatorRelayTest, AnUnreachableMemberIsReported) {
  ShardChannels channels{Limits(), TransportSecurity()};
  const auto listener = std::make_shared<Listener>();
  const auto relay =
      std::make_shared<CoordinatorRelay>(MakeSpec(), listener, Limits(), &channels, kTestSecret);
  EXPECT_FALSE(relay->Open().has_value());
  EXPECT_TRUE(WaitUntil([&] { return listener->failed_rank == 0; }));
  EXPECT_FALSE(relay->complete());
  EXPECT_NE(relay->Incomplete().message.find("all of q"), std::string::npos);
  relay->Stop();
}

// The relay and its streams refer to each other.
TEST(CoordinatorRelayTest, AStoppedRelayIsDestroyed) {
  ShardChannels channels{Limits(), TransportSecurity()};
  const auto listener = std::make_shared<Listener>();
  auto relay =
      std::make_shared<CoordinatorRelay>(MakeSpec(), listener, Limits(), &channels, kTestSecret);
  EXPECT_FALSE(relay->Open().has_value());
  relay->Stop();
  const std::weak_ptr<CoordinatorRelay> left = relay;
  relay.reset();
  EXPECT_TRUE(WaitUntil([&] { return left.expired(); }));
}

}  // namespace
}  // namespace ringattn::server

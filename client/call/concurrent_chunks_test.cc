// Two received chunks are copied concurrently: the client reads and handles the next message while
// the first chunk is still being copied.
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/api/client.h"
#include "client/testing/fake_attention_server.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

// More than a stream's window, so that a completed write means that the chunk is being read.
constexpr uint64_t kChunkBytes = 4 << 20;
constexpr uint64_t kChunks = 3;
constexpr absl::Duration kBound = absl::Seconds(20);

// What happens to the second chunk while the first one is being copied.
enum class Second { kWritten, kDamaged, kFollowedByAnError };

// A call whose first chunk stays in the progress callback until the server has written the second
// one and `meanwhile` has run.
class SlowFirstChunk {
 public:
  explicit SlowFirstChunk(Second second)
      : server_([this, second](int, const v1::ForwardHeader& header, auto*, ForwardStream* stream) {
          return Serve(second, header, stream);
        }) {
    args_.shape.set_batch(1);
    args_.shape.set_seq_len_q(kChunks * kChunkBytes / (4 * 64));
    args_.shape.set_seq_len_kv(1);
    args_.shape.set_num_heads(1);
    args_.shape.set_head_dim(64);
    args_.dtype = v1::DATA_TYPE_FLOAT32;
    q_.resize(kChunks * kChunkBytes);
    k_.resize(64 * 4);
    out_.resize(kChunks * kChunkBytes, 0xff);
    lse_.resize(kChunks * kChunkBytes / 64);
    args_.q = BytesOf(q_);
    args_.k = args_.v = BytesOf(k_);
  }

  // Returns when the call has ended.
  absl::Status Run(const std::function<void(const PendingCall&)>& meanwhile = nullptr) {
    ClientOptions client_options;
    client_options.max_chunk_bytes_down = kChunkBytes;
    client_options.retry.max_replays = 0;
    const auto client = *Client::Connect(server_.address(), client_options);
    absl::Notification started;
    std::optional<PendingCall> operation;
    CallOptions options;
    options.on_progress = [&](const v1::Progress& progress) {
      if (progress.state() != v1::REQUEST_STATE_DOWNLOADING || first_done_.exchange(true)) return;
      second_came_ = second_written_.WaitForNotificationWithTimeout(kBound);
      started.WaitForNotification();
      if (meanwhile) meanwhile(*operation);
    };
    operation = client->StartForward(
        args_, {.out = MutableBytesOf(out_), .lse = MutableBytesOf(lse_)}, options);
    started.Notify();
    return operation->Wait().status();
  }

  bool second_came() const { return second_came_; }
  const std::vector<uint8_t>& out() const { return out_; }

 private:
  grpc::Status Serve(Second second, const v1::ForwardHeader& header, ForwardStream* stream) {
    stream->Write(AcceptedFor(header));
    ReadUpload(header, stream);
    for (uint64_t i = 0; i < kChunks; ++i) {
      v1::ForwardResponse response;
      v1::TensorChunk* chunk = response.mutable_chunk();
      chunk->set_tensor(v1::TENSOR_ID_OUT);
      chunk->set_offset(i * kChunkBytes);
      chunk->set_data(std::string(kChunkBytes, static_cast<char>(i + 1)));
      if (i == 1 && second == Second::kDamaged) chunk->set_crc32c(1);
      stream->Write(response);
      if (i != 1) continue;
      second_written_.Notify();
      if (second == Second::kFollowedByAnError) {
        return FakeError{grpc::StatusCode::INTERNAL, "it broke", "BROKEN"}.ToStatus();
      }
    }
    SendChunk(stream, v1::TENSOR_ID_LSE, 0, std::string(lse_.size(), '\0'));
    v1::ForwardResponse last;
    last.mutable_summary()->set_flops(1);
    stream->Write(last);
    return grpc::Status::OK;
  }

  ForwardArgs args_;
  std::vector<uint8_t> q_, k_, out_, lse_;
  absl::Notification second_written_;
  std::atomic<bool> first_done_{false};
  std::atomic<bool> second_came_{false};
  FakeAttentionServer server_;  // last, so that it is destroyed first
};

// After a failed call the library must not touch the caller's memory.
void ExpectUntouchedFromNowOn(const SlowFirstChunk& call) {
  const std::vector<uint8_t> before = call.out();
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_TRUE(call.out() == before);
}

TEST(ConcurrentChunks, TheSecondChunkIsReadWhileTheFirstIsCopied) {
  SlowFirstChunk call(Second::kWritten);
  const absl::Status status = call.Run();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(call.second_came());
  for (uint64_t i = 0; i < call.out().size(); i += 4096) {
    ASSERT_EQ(call.out()[i], i / kChunkBytes + 1) << i;
  }
}

TEST(ConcurrentChunks, ADamagedSecondChunkFailsTheCall) {
  SlowFirstChunk call(Second::kDamaged);
  EXPECT_EQ(call.Run().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(call.second_came());
  ExpectUntouchedFromNowOn(call);
}

TEST(ConcurrentChunks, AnErrorAfterTheSecondChunkFailsTheCall) {
  SlowFirstChunk call(Second::kFollowedByAnError);
  EXPECT_EQ(call.Run().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(call.second_came());
  ExpectUntouchedFromNowOn(call);
}

TEST(ConcurrentChunks, ACallIsCancelledWhileTwoChunksAreCopied) {
  SlowFirstChunk call(Second::kWritten);
  const absl::Status status = call.Run([](const PendingCall& operation) { operation.Cancel(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(call.second_came());
  ExpectUntouchedFromNowOn(call);
}

}  // namespace
}  // namespace ringattn::client

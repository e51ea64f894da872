// Writers whose messages travel in step rings, against the real service and a small cache.
#include "worker/kv/step_rings.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/kv/step_metadata.h"
#include "common/security/credentials.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/kv/kv_test_cache.h"
#include "worker/kv/step_streams.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kRegionBytes = 64 << 10;

StepRingLayout TestLayout() {
  StepRingLayout layout;
  layout.slots = 2;
  layout.request_bytes = 1024;
  layout.response_bytes = 1024;
  return layout;
}

v1::StepRing TestRing(const std::string& region = "region") {
  v1::StepRing ring;
  ring.set_region_id(region);
  ring.set_offset(4096);
  ring.set_slots(2);
  ring.set_request_bytes(1024);
  ring.set_response_bytes(1024);
  return ring;
}

std::string RingReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  if (!details.ParseFromString(status.error_details()) || details.details().empty()) return "";
  return details.details(0).UnpackTo(&info) ? info.reason() : "";
}

// Waits for something that happens soon.
template <typename Condition>
bool Soon(const Condition& condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return false;
}

class StepRingsTest : public ::testing::Test {
 protected:
  // A writer: the client's end of the memory, and the stream.
  class Writer {
   public:
    explicit Writer(StepRingsTest* test)
        : requests(StepRingQueue::Requests(test->client_ + 4096, TestLayout())),
          responses(StepRingQueue::Responses(test->client_ + 4096, TestLayout())),
          word_(StepRingQueue::Requests(test->client_ + 4096, TestLayout()).word) {
      context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
      context_.AddMetadata(kStepHelloMetadataKey, HelloOf(1).SerializeAsString());
      stream_ = test->stub_->Steps(&context_);
    }
    // Returns false if the stream has ended instead.
    bool Hello(uint64_t epoch, const v1::StepRing& ring = TestRing()) {
      requests.Reset();
      v1::StepRequest request;
      *request.mutable_hello() = HelloOf(epoch);
      *request.mutable_hello()->mutable_ring() = ring;
      return stream_->Write(request) && stream_->Read(&response) && response.has_opened();
    }
    void Send(const v1::StepRequest& request) {
      requests.Put(static_cast<int64_t>(request.ByteSizeLong()),
                   [&](uint8_t* frame) { request.SerializeWithCachedSizesToArray(frame); });
      requests.Publish();
    }
    void Begin(const v1::StepBegin& begin) {
      v1::StepRequest request;
      *request.mutable_begin() = begin;
      Send(request);
    }
    void Call(const v1::LayerCall& call) {
      v1::StepRequest request;
      *request.mutable_call() = call;
      Send(request);
    }
    // The next response in the ring; false if none comes within `patience`.
    bool Read(absl::Duration patience = absl::Seconds(10)) {
      std::string frame;
      const absl::Time end = MonotonicNow() + patience;
      while (true) {
        const auto taken = responses.Take(&frame);
        EXPECT_TRUE(taken.ok()) << taken.status();
        if (!taken.ok()) return false;
        if (*taken) return response.ParseFromString(frame);
        if (MonotonicNow() >= end) return false;
        responses.Wait(absl::ZeroDuration(), absl::Milliseconds(10));
      }
    }
    // Whether the worker's thread sleeps until the next request.
    bool WorkerSleeps() const {
      return reinterpret_cast<const std::atomic<uint32_t>*>(word_ + 4)->load() != 0;
    }
    // One message on the stream.
    bool AskOnStream(const v1::StepRequest& request) {
      return stream_->Write(request) && stream_->Read(&response);
    }
    grpc::Status Finish() {
      while (stream_->Read(&response)) {
      }
      return stream_->Finish();
    }
    void Cancel() { context_.TryCancel(); }
    float Out() const {
      float value;
      std::memcpy(&value, response.result().out().data(), sizeof(value));
      return value;
    }

    StepRingWriter requests;
    StepRingReader responses;
    v1::StepResponse response;

   private:
    static v1::StepHello HelloOf(uint64_t epoch) {
      v1::StepHello hello;
      hello.set_cache_id("a");
      hello.set_epoch(epoch);
      hello.set_token(kTestToken);
      return hello;
    }

    const uint8_t* const word_;
    grpc::ClientContext context_;
    std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
  };

  StepRingsTest()
      : device_(1, 0),
        budget_(1 << 20),
        store_({.max_bytes = 1 << 20, .tick_interval = absl::ZeroDuration()}, &device_, &budget_,
               [this](v1::JoinRequest message) {
                 absl::MutexLock lock(&mutex_);
                 sent_.push_back(std::move(message));
               }) {
    const int fd = memfd_create("step-rings-test", 0);
    EXPECT_EQ(ftruncate(fd, kRegionBytes), 0);
    client_ = static_cast<uint8_t*>(
        mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    region_ = *Region::Map("region", fd, kRegionBytes);
    close(fd);
    StepRingOptions rings;
    rings.find_region = [this](const std::string& id) {
      absl::MutexLock lock(&mutex_);
      return id == "region" ? region_ : nullptr;
    };
    rings.spin = absl::Microseconds(20);
    rings.on_rings = [this](int64_t count) { rings_ = count; };
    rings.on_request = [this](bool) { ++waits_; };
    StepHooks hooks;
    hooks.on_received_bytes = [this](int64_t bytes) { stream_bytes_ += bytes; };
    hooks.on_ring_received_bytes = [this](int64_t bytes) { ring_bytes_ += bytes; };
    hooks.on_refused = [this](const std::string& reason) {
      absl::MutexLock lock(&mutex_);
      ++refused_[reason];
    };
    service_ = std::make_unique<KvShardServiceImpl>(&store_, "", hooks, rings);
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    stub_ = v1::KvShardService::NewStub(grpc::CreateChannel(
        absl::StrCat("127.0.0.1:", port), TransportSecurity().ChannelCredentials()));
    store_.Reserve(TestReserve("a"));
    EXPECT_TRUE(Next().kv_reserved().ok());
    Open(1, 0);
  }
  ~StepRingsTest() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
    service_.reset();
    munmap(client_, kRegionBytes);
  }

  v1::JoinRequest Next() {
    const auto any = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !sent_.empty(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&any));
    v1::JoinRequest message = std::move(sent_.front());
    sent_.pop_front();
    return message;
  }
  void Open(uint64_t epoch, uint64_t step, const std::string& region = "region") {
    v1::KvOpen open = TestOpen("a", epoch);
    open.set_region_id(region);
    store_.Open(open);
    Next();
    store_.Settle(TestSettle("a", epoch, step));
    EXPECT_TRUE(Next().kv_settled().ok());
  }
  // Only the ring keeps the region.
  void DropRegion() {
    absl::MutexLock lock(&mutex_);
    region_.reset();
  }
  std::weak_ptr<Region> WeakRegion() {
    absl::MutexLock lock(&mutex_);
    return region_;
  }
  void ExpectBadCall(Writer& writer, const std::string& message) {
    const grpc::Status status = writer.Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_EQ(RingReasonOf(status), "BAD_CALL");
    EXPECT_NE(status.error_message().find(message), std::string::npos) << status.error_message();
  }

  CpuDevice device_;
  MemoryBudget budget_;
  absl::Mutex mutex_;
  std::deque<v1::JoinRequest> sent_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> refused_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Region> region_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int64_t> rings_{0}, waits_{0}, stream_bytes_{0}, ring_bytes_{0};
  uint8_t* client_ = nullptr;
  KvStore store_;
  std::unique_ptr<KvShardServiceImpl> service_;
  std::unique_ptr<v1::KvShardService::Stub> stub_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(StepRingsTest, StepsAreAnsweredInTheRing) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  EXPECT_EQ(writer.response.opened().ring_spin().nanos(), 20000);
  for (uint64_t step = 1; step <= 40; ++step) {
    // A few requests wake the worker. Others find it awake, and it need not wait for them.
    if (step <= 5) {
      ASSERT_TRUE(Soon([&] { return writer.WorkerSleeps(); }));
    }
    writer.Begin(TestBegin(step, step - 1));
    writer.Call(TestCall(step, 0, 3));  // both are under way
    ASSERT_TRUE(writer.Read());
    ASSERT_TRUE(writer.response.has_accepted());
    ASSERT_TRUE(writer.Read());
    EXPECT_FLOAT_EQ(writer.Out(), 3);
    writer.Call(TestCall(step, 1, 5));
    ASSERT_TRUE(writer.Read());
    EXPECT_FLOAT_EQ(writer.Out(), 5);
  }
  EXPECT_TRUE(Soon([&] { return waits_ > 0; }));
  EXPECT_EQ(stream_bytes_, 0);
  EXPECT_EQ(ring_bytes_, 40 * 2 * 3 * 16);
  EXPECT_EQ(rings_, 1);
}

TEST_F(StepRingsTest, RingAndStreamMayAlternate) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  for (uint64_t step = 1; step <= 10; ++step) {
    v1::StepRequest request;
    *request.mutable_begin() = TestBegin(step, step - 1);
    ASSERT_TRUE(writer.AskOnStream(request));
    ASSERT_TRUE(writer.response.has_accepted());
    writer.Call(TestCall(step, 0, 2));
    ASSERT_TRUE(writer.Read());
    EXPECT_FLOAT_EQ(writer.Out(), 2);
    *request.mutable_call() = TestCall(step, 1, 4);
    ASSERT_TRUE(writer.AskOnStream(request));
    EXPECT_FLOAT_EQ(writer.Out(), 4);
  }
  EXPECT_EQ(stream_bytes_, ring_bytes_);
}

TEST_F(StepRingsTest, ACallAfterARefusedStepGetsAnEmptyFrame) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  writer.Begin(TestBegin(1, 5));
  writer.Call(TestCall(1, 0, 3));
  ASSERT_TRUE(writer.Read());
  EXPECT_TRUE(writer.response.has_refused());
  ASSERT_TRUE(writer.Read());
  EXPECT_EQ(writer.response.message_case(), v1::StepResponse::MESSAGE_NOT_SET);
  writer.Begin(TestBegin(1, 0));
  ASSERT_TRUE(writer.Read());
  EXPECT_TRUE(writer.response.has_accepted());
}

TEST_F(StepRingsTest, AnErrorEndsTheStreamWithItsReason) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  writer.Begin(TestBegin(7, 0));
  const grpc::Status status = writer.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(RingReasonOf(status), "STEP_ORDER");
  EXPECT_FALSE(writer.Read(absl::Milliseconds(20)));
  EXPECT_TRUE(Soon([&] { return rings_ == 0; }));
}

TEST_F(StepRingsTest, BadRingsAreRefused) {
  const auto refuse = [&](const v1::StepRing& ring, const std::string& message) {
    Writer writer(this);
    EXPECT_FALSE(writer.Hello(1, ring));
    ExpectBadCall(writer, message);
  };
  v1::StepRing ring = TestRing();
  ring.set_slots(3);
  refuse(ring, "ring.slots is 3");
  ring = TestRing();
  ring.set_request_bytes(100);
  refuse(ring, "ring.request_bytes is 100");
  ring = TestRing();
  ring.set_response_bytes(kRegionBytes);
  refuse(ring, "ring.offset is 4096");
  ring = TestRing();
  ring.set_offset(~uint64_t{4095});
  refuse(ring, "ring.offset is");
  refuse(TestRing("another"), "hello.ring.region_id");
  Open(2, 0, /*region=*/"");
  Writer writer(this);
  EXPECT_FALSE(writer.Hello(2));
  ExpectBadCall(writer, "hello.ring.region_id");
  EXPECT_EQ(rings_, 0);
}

TEST_F(StepRingsTest, ARegionThatIsNotAttachedIsUnavailable) {
  DropRegion();
  Writer writer(this);
  EXPECT_FALSE(writer.Hello(1));
  EXPECT_EQ(writer.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(StepRingsTest, AHostileCounterEndsTheStream) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  SharedWord(client_ + 4096).Store(3);
  ExpectBadCall(writer, "3 messages ahead; it has 2 slots");
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(refused_["BAD_CALL"], 1);
}

TEST_F(StepRingsTest, AnOversizedFrameEndsTheStream) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  const uint32_t length = 961;  // 1024 - 64 are accepted
  std::memcpy(client_ + 8192, &length, sizeof(length));
  SharedWord(client_ + 4096).Store(1);
  ExpectBadCall(writer, "has 961 bytes; a slot holds 960");
}

TEST_F(StepRingsTest, GarbageEndsTheStream) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  writer.requests.Put(5, [](uint8_t* frame) { std::memset(frame, 0xff, 5); });
  writer.requests.Publish();
  ExpectBadCall(writer, "not a StepRequest");
}

TEST_F(StepRingsTest, AResponseThatExceedsItsSlotEndsTheStream) {
  v1::StepRing ring = TestRing();
  ring.set_response_bytes(128);
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1, ring));
  v1::StepBegin begin;  // every row is refused with a detail
  begin.set_step(1);
  for (uint64_t sequence = 1; sequence <= 8; ++sequence) {
    v1::StepRow* row = begin.add_rows();
    row->set_sequence(sequence);
    row->set_expected_length(5);
    row->set_keep_length(5);
    row->set_append_tokens(1);
    row->set_q_tokens(1);
  }
  writer.Begin(begin);
  ExpectBadCall(writer, "a slot of the ring holds 64");
}

// The client may change its memory at any time: the worker's copies are what counts.
TEST_F(StepRingsTest, AClientThatScribblesSpoilsOnlyItsOwnStream) {
  std::atomic<bool> over{false};
  for (int round = 0; round < 20; ++round) {
    Writer writer(this);
    ASSERT_TRUE(writer.Hello(1)) << round;
    std::thread scribbler([&, round] {
      uint32_t state = 12345u + static_cast<uint32_t>(round);
      while (!over) {
        for (int64_t at = 8192; at < 8192 + 4 * 1024; at += 4) {
          state = state * 1664525u + 1013904223u;
          std::memcpy(client_ + at, &state, 4);
        }
      }
    });
    v1::StepRequest request;
    *request.mutable_begin() = TestBegin(1, 0);
    for (int i = 0; i < 50 && rings_ > 0; ++i) {
      writer.Send(request);
      absl::SleepFor(absl::Microseconds(200));
    }
    over = true;
    scribbler.join();
    over = false;
    writer.Cancel();
    writer.Finish();
    ASSERT_TRUE(Soon([&] { return rings_ == 0; }));
  }
  // The cache itself is whole.
  Open(2, 0);
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(2));
  writer.Begin(TestBegin(1, 0));
  ASSERT_TRUE(writer.Read());
  EXPECT_TRUE(writer.response.has_accepted());
}

TEST_F(StepRingsTest, ALaterStreamSilencesTheRingOfAnEarlierOne) {
  Writer first(this);
  ASSERT_TRUE(first.Hello(1));
  first.Begin(TestBegin(1, 0));
  ASSERT_TRUE(first.Read());
  Writer second(this);
  ASSERT_TRUE(second.Hello(1));  // the same memory, from zero
  // Fenced, or ended before that: its counter went backwards.
  EXPECT_FALSE(first.Finish().ok());
  ASSERT_TRUE(Soon([&] { return rings_ == 1; }));
  second.Begin(TestBegin(1, 0));  // sent again
  second.Call(TestCall(1, 0, 3));
  ASSERT_TRUE(second.Read());
  EXPECT_TRUE(second.response.has_accepted());
  ASSERT_TRUE(second.Read());
  EXPECT_FLOAT_EQ(second.Out(), 3);
  EXPECT_FALSE(second.Read(absl::Milliseconds(20)));
}

TEST_F(StepRingsTest, ANewEpochEndsTheRing) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  Open(2, 0);
  const grpc::Status status = writer.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(RingReasonOf(status), "KV_FENCED");
  writer.Begin(TestBegin(1, 0));
  EXPECT_FALSE(writer.Read(absl::Milliseconds(20)));
  EXPECT_TRUE(Soon([&] { return rings_ == 0; }));
}

TEST_F(StepRingsTest, TheEndOfTheCacheEndsTheRing) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  v1::KvFree free;
  free.add_cache_ids("a");
  free.set_reason("KV_DELETED");
  store_.Free(free);
  EXPECT_EQ(RingReasonOf(writer.Finish()), "KV_DELETED");
  EXPECT_TRUE(Soon([&] { return rings_ == 0; }));
}

TEST_F(StepRingsTest, AClientThatGoesLeavesNothing) {
  const std::weak_ptr<Region> region = WeakRegion();
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  DropRegion();
  EXPECT_FALSE(region.expired());
  writer.Cancel();
  writer.Finish();
  EXPECT_TRUE(Soon([&] { return region.expired() && rings_ == 0; }));
}

TEST_F(StepRingsTest, RingsAreBounded) {
  struct Owner : StepRingOwner {
    bool OnRingRequest(const v1::StepRequest&, StepRingWriter*) override { return true; }
    void OnRingError(const absl::Status&) override {}
  };
  StepRingOptions options;
  options.find_region = [this](const std::string&) {
    absl::MutexLock lock(&mutex_);
    return region_;
  };
  StepRings rings(options);
  std::vector<std::shared_ptr<AttachedRing>> attached;
  for (int i = 0; i < StepRings::kMaxRings; ++i) {
    auto ring = rings.Attach(TestRing(), std::make_shared<Owner>());
    ASSERT_TRUE(ring.ok()) << ring.status();
    attached.push_back(*std::move(ring));
  }
  EXPECT_TRUE(
      absl::IsResourceExhausted(rings.Attach(TestRing(), std::make_shared<Owner>()).status()));
  attached.front()->Stop();
  EXPECT_TRUE(Soon([&] { return rings.Attach(TestRing(), std::make_shared<Owner>()).ok(); }));
  StepRings none{StepRingOptions()};
  EXPECT_TRUE(
      absl::IsFailedPrecondition(none.Attach(TestRing(), std::make_shared<Owner>()).status()));
}

TEST_F(StepRingsTest, ClosingTheServiceWaitsForRings) {
  Writer writer(this);
  ASSERT_TRUE(writer.Hello(1));
  for (int i = 0; i < 10; ++i) {
    writer.Begin(TestBegin(1, 0));
    ASSERT_TRUE(writer.Read());
  }
  store_.Close();
  writer.Finish();
}

}  // namespace
}  // namespace ringattn::worker

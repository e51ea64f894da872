#include "worker/kv/kv_store.h"

#include <deque>

#include "absl/synchronization/notification.h"
#include "common/base/testing/wall_clock.h"
#include "common/kv/kv_error.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/kv/kv_test_cache.h"

namespace ringattn::worker {
namespace {

class TestStream : public KvStream {
 public:
  void End(const absl::Status& status) override { ended = status; }
  absl::Status ended;
};

// Serves no caches.
class OtherDevice : public CpuDevice {
 public:
  OtherDevice() : CpuDevice(1, 0) {}
  absl::StatusOr<std::unique_ptr<StepKernels>> MakeStepKernels() override {
    return absl::UnimplementedError("the device serves no K/V caches");
  }
};

class KvStoreTest : public ::testing::Test {
 protected:
  KvStoreTest() : device_(1, 0), budget_(1 << 20) { Make(&device_); }

  void Make(Device* device) {
    KvStoreOptions options;
    options.max_bytes = 40'000;
    options.tick_interval = absl::ZeroDuration();
    options.now = [this] { return now_; };
    store_.reset();
    store_ = std::make_unique<KvStore>(options, device, &budget_, [this](v1::JoinRequest message) {
      absl::MutexLock lock(&mutex_);
      sent_.push_back(std::move(message));
    });
  }

  v1::JoinRequest Next() {
    const auto any = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !sent_.empty(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&any));
    v1::JoinRequest message = std::move(sent_.front());
    sent_.pop_front();
    return message;
  }
  bool Quiet() {
    absl::MutexLock lock(&mutex_);
    return sent_.empty();
  }

  v1::KvReserved Reserve(const v1::KvReserve& reserve) {
    store_->Reserve(reserve);
    return Next().kv_reserved();
  }
  void OpenAndSettle(const std::string& id, uint64_t epoch, uint64_t step = 0) {
    store_->Open(TestOpen(id, epoch));
    EXPECT_EQ(Next().kv_opened().epoch(), epoch);
    store_->Settle(TestSettle(id, epoch, step));
    EXPECT_TRUE(Next().kv_settled().ok());
  }
  static v1::StepHello Hello(const std::string& id, uint64_t epoch) {
    v1::StepHello hello;
    hello.set_cache_id(id);
    hello.set_epoch(epoch);
    hello.set_token(kTestToken);
    return hello;
  }
  absl::Status Attach(const v1::StepHello& hello, bool with_token = true) {
    return store_->Attach(hello, with_token, stream_).status();
  }

  CpuDevice device_;
  MemoryBudget budget_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  absl::Mutex mutex_;
  std::deque<v1::JoinRequest> sent_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<TestStream> stream_ = std::make_shared<TestStream>();
  std::unique_ptr<KvStore> store_;
};

TEST_F(KvStoreTest, CachesAreReservations) {
  const v1::KvReserved reserved = Reserve(TestReserve("a"));
  EXPECT_TRUE(reserved.ok()) << reserved.reason();
  EXPECT_EQ(reserved.bytes(), 8192u);
  EXPECT_EQ(budget_.taken_bytes(), 8192);
  EXPECT_TRUE(Reserve(TestReserve("a")).ok());  // again
  EXPECT_EQ(store_->count(), 1);
  EXPECT_TRUE(Reserve(TestReserve("a", 9)).malformed());
  const v1::KvReserved large = Reserve(TestReserve("b", 1000));
  EXPECT_FALSE(large.ok());
  EXPECT_FALSE(large.malformed());
  EXPECT_NE(large.reason().find("--max_kv_cache_bytes"), std::string::npos) << large.reason();
  v1::KvReserve bad = TestReserve("c");
  bad.mutable_placement()->set_head_parts(2);
  EXPECT_TRUE(Reserve(bad).malformed());
  bad = TestReserve("c");
  bad.mutable_spec()->set_blocks(0);
  EXPECT_TRUE(Reserve(bad).malformed());
  v1::KvFree free;
  free.add_cache_ids("a");
  free.add_cache_ids("unknown");
  store_->Free(free);
  EXPECT_EQ(budget_.taken_bytes(), 0);
  EXPECT_EQ(store_->bytes(), 0);
  EXPECT_TRUE(Quiet());
}

TEST_F(KvStoreTest, TheMemoryLimitCountsOperationsToo) {
  auto other = budget_.Take(budget_.limit_bytes() - 100);
  const v1::KvReserved reserved = Reserve(TestReserve("a"));
  EXPECT_FALSE(reserved.ok());
  EXPECT_EQ(store_->count(), 0);
}

TEST_F(KvStoreTest, ADeviceWithoutStepKernelsRefusesByName) {
  OtherDevice other;
  Make(&other);
  const v1::KvReserved reserved = Reserve(TestReserve("a"));
  EXPECT_FALSE(reserved.ok());
  EXPECT_EQ(reserved.reason(), "the device serves no K/V caches");
  store_.reset();
}

TEST_F(KvStoreTest, WritersNeedTheTokenOfTheSettledEpoch) {
  Reserve(TestReserve("a"));
  const absl::Status unknown = Attach(Hello("b", 1));
  EXPECT_TRUE(absl::IsUnauthenticated(unknown));
  EXPECT_EQ(Attach(Hello("a", 1)), unknown);  // not opened
  store_->Open(TestOpen("a", 1));
  Next();
  EXPECT_EQ(KvErrorReason(Attach(Hello("a", 1))), "KV_FENCED");  // not settled
  store_->Settle(TestSettle("a", 1, 0));
  Next();
  EXPECT_TRUE(Attach(Hello("a", 1)).ok());
  v1::StepHello hello = Hello("a", 1);
  hello.set_token("another");
  EXPECT_EQ(Attach(hello), unknown);
  hello.clear_token();
  EXPECT_EQ(Attach(hello), unknown);
  EXPECT_TRUE(Attach(hello, /*with_token=*/false).ok());  // the coordinator
  EXPECT_EQ(KvErrorReason(Attach(Hello("b", 1), false)), "KV_NOT_FOUND");
  EXPECT_EQ(KvErrorReason(Attach(Hello("a", 2))), "KV_FENCED");
  hello = Hello("a", 1);
  hello.set_rank(1);
  EXPECT_EQ(KvErrorReason(Attach(hello)), "BAD_CALL");
}

TEST_F(KvStoreTest, LaterStreamsAndWritersReplaceEarlierOnes) {
  Reserve(TestReserve("a"));
  OpenAndSettle("a", 1);
  const auto first = stream_;
  ASSERT_TRUE(Attach(Hello("a", 1)).ok());
  stream_ = std::make_shared<TestStream>();
  ASSERT_TRUE(Attach(Hello("a", 1)).ok());
  EXPECT_EQ(KvErrorReason(first->ended), "KV_FENCED");
  OpenAndSettle("a", 2);
  EXPECT_TRUE(absl::IsAborted(stream_->ended));
  // An older epoch changes nothing and receives the newest one.
  store_->Open(TestOpen("a", 1));
  EXPECT_EQ(Next().kv_opened().epoch(), 2u);
  EXPECT_TRUE(Attach(Hello("a", 2)).ok());
  store_->Open(TestOpen("b", 1));
  EXPECT_TRUE(Next().kv_opened().missing());
  store_->Settle(TestSettle("b", 1, 0));
  EXPECT_FALSE(Next().kv_settled().ok());
  store_->Settle(TestSettle("a", 2, 5));
  EXPECT_FALSE(Next().kv_settled().ok());
}

TEST_F(KvStoreTest, FreeingEndsTheStreamWithTheReason) {
  for (const char* reason : {"KV_DELETED", "KV_RANKS_DIFFER"}) {
    Reserve(TestReserve("a"));
    OpenAndSettle("a", 1);
    stream_ = std::make_shared<TestStream>();
    ASSERT_TRUE(Attach(Hello("a", 1)).ok());
    v1::KvFree free;
    free.add_cache_ids("a");
    free.set_reason(reason);
    store_->Free(free);
    EXPECT_EQ(KvErrorReason(stream_->ended), reason);
    EXPECT_EQ(absl::IsDataLoss(stream_->ended), std::string(reason) == "KV_RANKS_DIFFER");
  }
}

TEST_F(KvStoreTest, CachesOfALeavingWorkerEndWithTheReason) {
  const auto leaves = [this] {
    return stream_->ended.message().find("ordered to end") != std::string::npos;
  };
  for (const char* reason : {"KV_RANKS_DIFFER", "KV_LOST"}) {
    Reserve(TestReserve("a"));
    OpenAndSettle("a", 1);
    stream_ = std::make_shared<TestStream>();
    ASSERT_TRUE(Attach(Hello("a", 1)).ok());
    store_->SetLeaving();
    v1::KvFree free;
    free.add_cache_ids("a");
    free.set_reason(reason);
    store_->Free(free);
    EXPECT_EQ(KvErrorReason(stream_->ended), reason);
    EXPECT_EQ(leaves(), std::string(reason) == "KV_LOST");
  }
}

TEST_F(KvStoreTest, ReportsCachesInUseAtMostOnceASecond) {
  Reserve(TestReserve("a"));
  store_->Tick();
  EXPECT_TRUE(Quiet());
  OpenAndSettle("a", 1);
  auto cache = store_->Attach(Hello("a", 1), true, stream_);
  const auto use = [&] {
    store_->engine()->Run([&](StepKernels*) { (*cache)->Publish(now_, true); });
  };
  store_->Tick();
  EXPECT_EQ(Next().kv_touched().epoch(), 1u);
  use();
  store_->Tick();
  EXPECT_TRUE(Quiet());
  now_ += absl::Seconds(1);
  store_->Tick();
  const v1::KvTouched touched = Next().kv_touched();
  EXPECT_EQ(touched.cache_id(), "a");
  now_ += absl::Seconds(5);
  store_->Tick();
  EXPECT_TRUE(Quiet());  // not used since
}

TEST_F(KvStoreTest, CachesOutliveTheirCoordinatorForAWhile) {
  Reserve(TestReserve("a"));
  v1::KvReserve brief = TestReserve("b");
  brief.mutable_ttl()->set_seconds(5);
  Reserve(brief);
  OpenAndSettle("a", 3);
  ASSERT_TRUE(Attach(Hello("a", 3)).ok());
  store_->OnDisconnected();
  now_ += absl::Seconds(6);
  store_->OnDisconnected();  // failed attempts to reconnect do not prolong it
  store_->Tick();
  EXPECT_EQ(store_->count(), 1) << "b's lease has ended";
  v1::Register registration;
  store_->AddHeldCaches(&registration);
  EXPECT_EQ(registration.max_kv_cache_bytes(), 40'000u);
  ASSERT_EQ(registration.kv_caches_size(), 1);
  EXPECT_EQ(registration.kv_caches(0).reserve().cache_id(), "a");
  EXPECT_EQ(registration.kv_caches(0).epoch(), 3u);
  EXPECT_EQ(registration.kv_caches(0).lease_left().seconds(), 54);
  EXPECT_TRUE(stream_->ended.ok());
  store_->OnRegistered();
  now_ += absl::Seconds(100);
  store_->Tick();
  EXPECT_EQ(store_->count(), 1) << "leases are the coordinator's";
  store_->OnDisconnected();
  now_ += absl::Seconds(60);
  store_->Tick();
  EXPECT_EQ(store_->count(), 0);
  EXPECT_EQ(budget_.taken_bytes(), 0);
  EXPECT_EQ(KvErrorReason(stream_->ended), "KV_LOST");
}

TEST_F(KvStoreTest, LeasesDoNotFollowTheWallClock) {
  store_.reset();
  KvStoreOptions options;
  options.max_bytes = 40'000;
  options.tick_interval = absl::Milliseconds(1);
  absl::Notification reserved;
  store_ = std::make_unique<KvStore>(options, &device_, &budget_,
                                     [&](v1::JoinRequest) { reserved.Notify(); });
  store_->Reserve(TestReserve("a"));
  reserved.WaitForNotification();
  store_->OnDisconnected();
  SetWallClockBack(-absl::Hours(2));
  const absl::Time jumped = store_->now();
  store_->Tick();
  v1::Register registration;
  store_->AddHeldCaches(&registration);
  SetWallClockBack(absl::ZeroDuration());
  EXPECT_LT(jumped - store_->now(), absl::Minutes(1));
  ASSERT_EQ(registration.kv_caches_size(), 1) << "an orphan is kept for a minute";
  EXPECT_GT(registration.kv_caches(0).lease_left().seconds(), 30);
  store_.reset();
}

TEST_F(KvStoreTest, AClosedStoreIsSilent) {
  Reserve(TestReserve("a"));
  store_->Close();
  EXPECT_EQ(budget_.taken_bytes(), 0);
  store_->Reserve(TestReserve("b"));
  store_->Open(TestOpen("b", 1));
  store_->Close();
  EXPECT_TRUE(Quiet());
}

}  // namespace
}  // namespace ringattn::worker

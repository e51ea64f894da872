// Caches that a device keeps in its own memory (Device::kv_caches): what the shard passes to it,
// and what its errors become.
#include <deque>
#include <string>
#include <vector>

#include "common/kv/kv_error.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/kv/kv_store.h"
#include "worker/kv/kv_test_cache.h"

namespace ringattn::worker {
namespace {

// Records the calls of the fake cache, and holds its answers.
struct Fake {
  DeviceKvShape shape;
  std::vector<std::string> calls;
  absl::Status make = absl::OkStatus();
  absl::Status zero = absl::OkStatus();
  absl::Status next = absl::OkStatus();  // of the other calls
  int64_t extra_bytes = 100;
  int live = 0;
};

class FakeCache : public DeviceKvCache {
 public:
  explicit FakeCache(Fake* fake) : fake_(fake) { ++fake_->live; }
  ~FakeCache() override { --fake_->live; }
  int64_t bytes() const override { return 8192 + fake_->extra_bytes; }
  absl::Status Zero(const std::atomic<bool>& stop) override {
    fake_->calls.push_back("zero");
    return fake_->zero;
  }
  absl::Status CopyBlock(int group, uint32_t source, uint32_t target, int64_t entries) override {
    fake_->calls.push_back(absl::StrCat("copy ", source, " to ", target, " ", entries));
    return fake_->next;
  }
  absl::Status SetRows(int group, absl::Span<const DeviceKvRow> rows) override {
    std::string call = "rows";
    for (const DeviceKvRow& row : rows) {
      absl::StrAppend(&call, " ", row.keep_length, "+", row.append_tokens, ":", row.q_tokens, "@",
                      row.first_position, "/", row.table.size());
    }
    fake_->calls.push_back(call);
    return fake_->next;
  }
  absl::Status Run(const DeviceKvCall& call) override {
    fake_->calls.push_back(absl::StrCat("run ", call.plane, call.partial ? " partial" : "", " q",
                                        call.q.size(), " k", call.k.size(), " out", call.out.size(),
                                        " lse", call.lse.size()));
    return fake_->next;
  }

 private:
  Fake* const fake_;
};

class FakeDevice : public CpuDevice, public DeviceKvCaches {
 public:
  FakeDevice() : CpuDevice(1, 0) {}
  DeviceKvCaches* kv_caches() override { return this; }
  int64_t scratch_bytes() const override { return 1000; }
  absl::StatusOr<std::unique_ptr<DeviceKvCache>> Make(const DeviceKvShape& shape) override {
    if (!fake.make.ok()) return fake.make;
    fake.shape = shape;
    return std::make_unique<FakeCache>(&fake);
  }
  Fake fake;
};

class DeviceCacheTest : public ::testing::Test {
 protected:
  DeviceCacheTest() : budget_(20'000) {
    KvStoreOptions options;
    options.max_bytes = 40'000;
    options.tick_interval = absl::ZeroDuration();
    store_ =
        std::make_unique<KvStore>(options, &device_, &budget_, [this](v1::JoinRequest message) {
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
  v1::KvReserved Reserve(const v1::KvReserve& reserve) {
    store_->Reserve(reserve);
    return Next().kv_reserved();
  }
  // A cache "a" that is open and settled.
  std::shared_ptr<KvCache> OpenCache(const v1::KvReserve& reserve = TestReserve("a")) {
    EXPECT_TRUE(Reserve(reserve).ok());
    store_->Open(TestOpen("a", 1));
    Next();
    store_->Settle(TestSettle("a", 1, 0));
    EXPECT_TRUE(Next().kv_settled().ok());
    v1::StepHello hello;
    hello.set_cache_id("a");
    hello.set_epoch(1);
    hello.set_token(kTestToken);
    hello.set_rank(reserve.rank());
    return *store_->Attach(hello, true, nullptr);
  }
  absl::Status Begin(KvCache* cache, const v1::StepBegin& begin) {
    absl::Status status;
    store_->engine()->Run([&](StepKernels*) {
      v1::StepResponse response;
      status = cache->shard()->Begin(1, begin, &response);
      cache->Publish(store_->now(), true);
    });
    return status;
  }
  absl::Status Call(KvCache* cache, const v1::LayerCall& call) {
    absl::Status status;
    store_->engine()->Run([&](StepKernels* kernels) {
      EXPECT_EQ(kernels, nullptr);
      v1::LayerResult result;
      status = cache->shard()->Call(1, call, kernels, cache->stop(), &result);
      cache->Publish(store_->now(), true);
    });
    return status;
  }

  FakeDevice device_;
  MemoryBudget budget_;
  absl::Mutex mutex_;
  std::deque<v1::JoinRequest> sent_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<KvStore> store_;
};

TEST_F(DeviceCacheTest, ItsMemoryIsReserved) {
  EXPECT_TRUE(Reserve(TestReserve("a")).ok());
  EXPECT_EQ(budget_.taken_bytes(), 1000 + 8192 + 100);
  device_.fake.extra_bytes = 200;
  EXPECT_TRUE(Reserve(TestReserve("b")).ok());
  EXPECT_EQ(budget_.taken_bytes(), 1000 + 2 * 8192 + 300);
  const v1::KvReserved third = Reserve(TestReserve("c"));
  EXPECT_FALSE(third.ok());
  EXPECT_FALSE(third.unsupported());
  EXPECT_EQ(device_.fake.live, 2);
  v1::KvFree free;
  free.add_cache_ids("a");
  free.add_cache_ids("b");
  store_->Free(free);
  EXPECT_EQ(budget_.taken_bytes(), 1000);  // scratch memory, for the next cache
  EXPECT_EQ(device_.fake.live, 0);
}

TEST_F(DeviceCacheTest, TheShapeIsTheRanksPart) {
  v1::KvReserve reserve = TestReserve("a");
  v1::KvLayerGroup* group = reserve.mutable_spec()->mutable_groups(0);
  group->set_num_heads(8);
  group->set_num_kv_heads(4);
  const std::vector<float> sinks = {0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17};
  group->set_sinks(std::string(reinterpret_cast<const char*>(sinks.data()), sinks.size() * 4));
  reserve.mutable_placement()->add_members("worker-1");
  reserve.mutable_placement()->set_head_parts(2);
  reserve.set_rank(1);
  device_.fake.extra_bytes = 0;
  const v1::KvReserved reserved = Reserve(reserve);
  EXPECT_TRUE(reserved.ok()) << reserved.reason();
  const DeviceKvShape& shape = device_.fake.shape;
  EXPECT_EQ(shape.planes, (std::vector<DeviceKvShape::Plane>{{8, 8}, {8, 8}}));
  ASSERT_EQ(shape.groups.size(), 1u);
  EXPECT_EQ(shape.groups[0].num_heads, 4);
  EXPECT_EQ(shape.groups[0].num_kv_heads, 2);
  EXPECT_EQ(shape.groups[0].sinks, (std::vector<float>{4, 5, 6, 7, 14, 15, 16, 17}));
}

TEST_F(DeviceCacheTest, MemoryThatCannotBeZeroedIsFreed) {
  device_.fake.zero = absl::InternalError("cudaMemsetAsync: launch failed");
  const v1::KvReserved reserved = Reserve(TestReserve("a"));
  EXPECT_FALSE(reserved.ok());
  EXPECT_NE(reserved.reason().find("cudaMemsetAsync: launch failed"), std::string::npos);
  device_.fake.zero = absl::OkStatus();
  // Zeroing runs in the order of reservations, so the first cache is free now.
  EXPECT_TRUE(Reserve(TestReserve("b")).ok());
  EXPECT_EQ(store_->count(), 1);
  EXPECT_EQ(budget_.taken_bytes(), 1000 + 8192 + 100);
}

TEST_F(DeviceCacheTest, AShapeThatNoKernelServesIsUnsupported) {
  device_.fake.make = absl::UnimplementedError("spec.blocks is 268435456 of 16 tokens");
  const v1::KvReserved reserved = Reserve(TestReserve("a"));
  EXPECT_TRUE(reserved.unsupported());
  EXPECT_EQ(reserved.reason(), "spec.blocks is 268435456 of 16 tokens");
  EXPECT_EQ(budget_.taken_bytes(), 1000);
}

// Part 1 of 2: the blocks of entries 16 to 31, 48 to 63 and so on.
TEST_F(DeviceCacheTest, APositionPartGetsItsOwnEntries) {
  v1::KvReserve reserve = TestReserve("a");
  reserve.mutable_placement()->add_members("worker-1");
  reserve.mutable_placement()->set_position_parts(2);
  reserve.set_rank(1);
  const std::shared_ptr<KvCache> cache = OpenCache(reserve);
  EXPECT_EQ(device_.fake.shape.position_parts, 2);
  EXPECT_EQ(device_.fake.shape.position_part, 1);
  device_.fake.calls.clear();
  ASSERT_TRUE(Begin(cache.get(), TestBegin(1, 0, 40)).ok());
  v1::LayerCall call = TestCall(1, 0, 1, 16);
  EXPECT_EQ(Call(cache.get(), call).code(), absl::StatusCode::kInvalidArgument);
  call.set_output(v1::KV_OUTPUT_PARTIAL);
  ASSERT_TRUE(Call(cache.get(), call).ok());
  call.set_layer(1);
  ASSERT_TRUE(Call(cache.get(), call).ok());
  // Entries 40 to 49 are in part 0 but for two.
  ASSERT_TRUE(Begin(cache.get(), TestBegin(2, 40, 10)).ok());
  v1::LayerCall next = TestCall(2, 0, 1, 2);
  next.set_output(v1::KV_OUTPUT_PARTIAL);
  ASSERT_TRUE(Call(cache.get(), next).ok());
  EXPECT_EQ(device_.fake.calls,
            (std::vector<std::string>{"rows 0+16:1@39/2", "run 0 partial q16 k256 out16 lse4",
                                      "run 1 partial q16 k256 out16 lse4", "rows 16+2:1@49/2",
                                      "run 0 partial q16 k32 out16 lse4"}));
}

TEST_F(DeviceCacheTest, AStepWithoutQueriesIsPartialOnAPositionPart) {
  v1::KvReserve reserve = TestReserve("a");
  reserve.mutable_placement()->add_members("worker-1");
  reserve.mutable_placement()->set_position_parts(2);
  const std::shared_ptr<KvCache> cache = OpenCache(reserve);
  device_.fake.calls.clear();
  v1::StepBegin begin = TestBegin(1, 0, 3);
  begin.mutable_rows(0)->set_q_tokens(0);
  ASSERT_TRUE(Begin(cache.get(), begin).ok());
  v1::LayerCall call = TestCall(1, 0, 1, 3);
  call.clear_q();
  call.set_output(v1::KV_OUTPUT_NONE);
  ASSERT_TRUE(Call(cache.get(), call).ok());
  EXPECT_EQ(device_.fake.calls,
            (std::vector<std::string>{"rows 0+3:0@3/1", "run 0 partial q0 k48 out0 lse0"}));
}

TEST_F(DeviceCacheTest, RowsAreSetOncePerStepAndBlocksAreCopiedFirst) {
  const std::shared_ptr<KvCache> cache = OpenCache();
  device_.fake.calls.clear();
  ASSERT_TRUE(Begin(cache.get(), TestBegin(1, 0, 17)).ok());
  ASSERT_TRUE(Call(cache.get(), TestCall(1, 0, 1, 17)).ok());
  v1::LayerCall call = TestCall(1, 1, 1, 17);
  call.set_output(v1::KV_OUTPUT_PARTIAL);
  ASSERT_TRUE(Call(cache.get(), call).ok());
  EXPECT_EQ(device_.fake.calls,
            (std::vector<std::string>{"rows 0+17:1@16/2", "run 0 q16 k272 out16 lse0",
                                      "run 1 partial q16 k272 out16 lse4"}));
  device_.fake.calls.clear();
  v1::StepBegin fork = TestBegin(2, 17);
  v1::KvFork* command = fork.add_commands()->mutable_fork();
  command->set_source(1);
  command->set_target(2);
  command->set_length(17);
  ASSERT_TRUE(Begin(cache.get(), fork).ok());
  ASSERT_TRUE(Call(cache.get(), TestCall(2, 0, 1)).ok());
  EXPECT_EQ(device_.fake.calls, (std::vector<std::string>{"copy 1 to 2 1", "rows 17+1:1@17/2",
                                                          "run 0 q16 k16 out16 lse0"}));
}

TEST_F(DeviceCacheTest, ATooLargeCallLeavesTheCacheAsItIs) {
  const std::shared_ptr<KvCache> cache = OpenCache();
  ASSERT_TRUE(Begin(cache.get(), TestBegin(1, 0)).ok());
  device_.fake.next = absl::ResourceExhaustedError("the call has 9 rows; the maximum is 8");
  EXPECT_EQ(Call(cache.get(), TestCall(1, 0, 1)).code(), absl::StatusCode::kResourceExhausted);
  device_.fake.next = absl::OkStatus();
  EXPECT_TRUE(Call(cache.get(), TestCall(1, 0, 1)).ok());
}

TEST_F(DeviceCacheTest, AnErrorOfTheDeviceLosesTheCache) {
  const std::shared_ptr<KvCache> cache = OpenCache();
  ASSERT_TRUE(Begin(cache.get(), TestBegin(1, 0)).ok());
  device_.fake.next = absl::InternalError("cudaGraphLaunch: out of memory");
  const absl::Status status = Call(cache.get(), TestCall(1, 0, 1));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(KvErrorReason(status), "KV_LOST");
  EXPECT_NE(status.message().find("cudaGraphLaunch: out of memory"), absl::string_view::npos);
  device_.fake.next = absl::OkStatus();
  device_.fake.calls.clear();
  EXPECT_EQ(Call(cache.get(), TestCall(1, 0, 1)), status);
  EXPECT_EQ(Begin(cache.get(), TestBegin(1, 0)), status);
  EXPECT_TRUE(device_.fake.calls.empty());
  store_->Tick();
  const v1::JoinRequest touched = Next();
  EXPECT_EQ(touched.kv_touched().cache_id(), "a");
  EXPECT_EQ(touched.kv_touched().failure(), status.message());
  store_->Tick();  // reported once
  store_->Open(TestOpen("a", 2));
  const v1::JoinRequest opened = Next();
  EXPECT_TRUE(opened.kv_opened().missing());
}

}  // namespace
}  // namespace ringattn::worker

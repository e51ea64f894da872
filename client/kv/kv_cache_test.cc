#include "client/api/kv_cache.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/api/client.h"
#include "client/api/error.h"
#include "client/kv/fake_kv_service.h"
#include "common/base/monotonic_time.h"
#include "common/base/testing/wall_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using Faults = FakeKvService::Faults;
using Seen = FakeKvService::Seen;

constexpr int kHeads = 4;
constexpr int kDim = 8;

v1::KvCacheSpec TwoLayers() {
  v1::KvCacheSpec spec;
  v1::KvLayerGroup* group = spec.add_groups();
  group->add_layers(0);
  group->add_layers(1);
  group->set_num_heads(kHeads);
  group->set_num_kv_heads(2);
  group->set_head_dim(kDim);
  spec.set_dtype(v1::DATA_TYPE_FLOAT32);
  spec.set_block_tokens(16);
  spec.set_blocks(4);
  return spec;
}

v1::StepBegin OneRow(uint64_t length, uint32_t tokens) {
  v1::StepBegin begin;
  v1::StepRow* row = begin.add_rows();
  row->set_sequence(1);
  row->set_expected_length(length);
  row->set_keep_length(length);
  row->set_append_tokens(tokens);
  row->set_q_tokens(tokens);
  return begin;
}

class KvCacheTest : public ::testing::Test {
 protected:
  void Start(int world_size, TransportPreference transport) {
    fake_ = std::make_unique<FakeKvService>(TwoLayers(), world_size);
    client_ = *Client::Connect(fake_->address());
    KvOpenOptions options;
    options.transport = transport;
    options.recovery_time = absl::Seconds(5);
    auto cache = KvCache::Create(client_.get(), TwoLayers(), {}, options);
    ASSERT_TRUE(cache.ok()) << cache.status();
    cache_ = *std::move(cache);
  }

  // Calls a layer with q that is different in every element, which must come back.
  absl::Status Call(uint32_t layer, int tokens, const KvCallOptions& options = {}) {
    std::vector<float> q(tokens * kHeads * kDim), k(tokens * 2 * kDim, 1), out(q.size());
    for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i + 1000 * layer);
    KvLayerArgs args;
    args.layer = layer;
    args.q = BytesOf(q);
    args.k = args.v = BytesOf(k);
    auto report = cache_->CallLayer(args, {.out = MutableBytesOf(out)}, options);
    if (!report.ok()) return report.status();
    EXPECT_EQ(out, q);
    EXPECT_GT(report->device_time, absl::ZeroDuration());
    return absl::OkStatus();
  }

  absl::Status Step(uint64_t length, uint32_t tokens) {
    if (auto status = cache_->BeginStep(OneRow(length, tokens)); !status.ok()) return status;
    for (const uint32_t layer : {0u, 1u}) {
      if (auto status = Call(layer, static_cast<int>(tokens)); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  std::vector<std::string> Messages() {
    return fake_->With([](Faults&, Seen& seen) { return seen.messages; });
  }

  std::unique_ptr<FakeKvService> fake_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<KvCache> cache_;
};

TEST_F(KvCacheTest, TheDescriptionTravelsWithTheFirstCall) {
  Start(1, TransportPreference::kDirect);
  EXPECT_EQ(cache_->id(), "cache");
  EXPECT_EQ(cache_->transport(), v1::TRANSPORT_DIRECT);
  ASSERT_TRUE(cache_->BeginStep(OneRow(0, 3)).ok());
  EXPECT_THAT(Messages(), IsEmpty());
  ASSERT_TRUE(Call(0, 3).ok());
  ASSERT_TRUE(Call(1, 3).ok());
  ASSERT_TRUE(Step(3, 1).ok());
  EXPECT_THAT(Messages(), ElementsAre("0 begin 1", "0 call 1", "0 call 1", "0 begin 2", "0 call 2",
                                      "0 call 2"));
  EXPECT_THAT(cache_->sequences(), ElementsAre(Pair(1, 4)));
  EXPECT_EQ(cache_->step(), 2u);
  ASSERT_TRUE(cache_->CommitStep().ok());
  ASSERT_TRUE(cache_->RoundTrip().ok());
}

TEST_F(KvCacheTest, HeadsAreCutAndJoined) {
  Start(2, TransportPreference::kDirect);
  EXPECT_EQ(cache_->placement().head_parts(), 2u);
  ASSERT_TRUE(Step(0, 5).ok());
  ASSERT_TRUE(Step(5, 1).ok());
}

TEST_F(KvCacheTest, ABrokenStreamIsReopenedInTheSameEpoch) {
  for (const TransportPreference transport :
       {TransportPreference::kDirect, TransportPreference::kRelay}) {
    const int world_size = transport == TransportPreference::kDirect ? 2 : 1;
    Start(world_size, transport);
    ASSERT_TRUE(Step(0, 3).ok());
    ASSERT_TRUE(cache_->BeginStep(OneRow(3, 1)).ok());
    ASSERT_TRUE(Call(0, 1).ok());
    const uint64_t epoch = cache_->epoch();
    fake_->With([&](Faults& faults, Seen&) { faults.breaks = {world_size - 1}; });
    ASSERT_TRUE(Call(1, 1).ok());
    EXPECT_EQ(cache_->epoch(), epoch);
    fake_->With([&](Faults&, Seen& seen) {
      EXPECT_EQ(seen.streams, 2 * world_size);
      EXPECT_EQ(seen.last_epoch, epoch);
      EXPECT_EQ(seen.opens.size(), 1u);
    });
    EXPECT_THAT(cache_->sequences(), ElementsAre(Pair(1, 4)));
    ASSERT_TRUE(Step(4, 1).ok());
    cache_.reset();
  }
}

TEST_F(KvCacheTest, FencedLostAndExpiredAreTyped) {
  Start(2, TransportPreference::kDirect);
  ASSERT_TRUE(Step(0, 3).ok());
  fake_->Fence();
  absl::Status status = Step(3, 1);
  EXPECT_TRUE(IsKvFenced(status)) << status;
  EXPECT_TRUE(absl::IsAborted(status));
  EXPECT_TRUE(IsKvFenced(cache_->BeginStep(OneRow(3, 1))));

  for (const auto& [code, reason] :
       {std::pair(grpc::StatusCode::DATA_LOSS, "KV_LOST"),
        std::pair(grpc::StatusCode::FAILED_PRECONDITION, "KV_EXPIRED")}) {
    Start(2, TransportPreference::kDirect);
    ASSERT_TRUE(Step(0, 3).ok());
    fake_->With([&](Faults& faults, Seen&) {
      faults.breaks = {1};
      faults.ended = FakeRpcStatus(code, "gone", reason);
    });
    status = Step(3, 1);
    EXPECT_TRUE(IsKvGone(status)) << status;
    EXPECT_EQ(DetailsOf(status).reason, reason);
    EXPECT_TRUE(IsKvGone(cache_->RunCommands({})));
    cache_.reset();
  }
}

TEST_F(KvCacheTest, ARefusedStepLeavesItsNumberFree) {
  Start(2, TransportPreference::kDirect);
  ASSERT_TRUE(Step(0, 3).ok());
  ASSERT_TRUE(cache_->BeginStep(OneRow(3, 100)).ok());
  const absl::Status status = Call(0, 100);
  EXPECT_EQ(DetailsOf(status).reason, kStepRefused) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("KV_FULL"));
  ASSERT_EQ(cache_->refusal().rows_size(), 1);
  EXPECT_EQ(cache_->refusal().rows(0).reason(), "KV_FULL");
  EXPECT_GT(cache_->refusal().rows(0).blocks_missing(), 0u);
  EXPECT_THAT(cache_->sequences(), ElementsAre(Pair(1, 3)));
  ASSERT_TRUE(Step(3, 1).ok());
  EXPECT_EQ(cache_->step(), 2u);
  // The streams stay open: the call that was sent with the description is skipped.
  fake_->With([](Faults&, Seen& seen) { EXPECT_EQ(seen.streams, 2); });
}

TEST_F(KvCacheTest, ALeavingWorkerIsReported) {
  Start(2, TransportPreference::kDirect);
  ASSERT_TRUE(Step(0, 3).ok());
  EXPECT_FALSE(cache_->leaving());
  fake_->With([](Faults& faults, Seen&) { faults.leaving = {1}; });
  ASSERT_TRUE(Step(3, 1).ok());
  EXPECT_TRUE(cache_->leaving());
}

TEST_F(KvCacheTest, CommandsAreStepsOfTheirOwn) {
  Start(1, TransportPreference::kRelay);
  ASSERT_TRUE(Step(0, 20).ok());
  v1::KvCommand fork, drop;
  fork.mutable_fork()->set_source(1);
  fork.mutable_fork()->set_target(2);
  fork.mutable_fork()->set_length(10);
  drop.mutable_drop()->add_sequences(1);
  ASSERT_TRUE(cache_->RunCommands({fork, drop}).ok());
  EXPECT_THAT(cache_->sequences(), ElementsAre(Pair(2, 10)));
  const absl::Status status = cache_->RunCommands({drop});
  EXPECT_EQ(DetailsOf(status).reason, kStepRefused) << status;
  EXPECT_TRUE(cache_->refusal().rows(0).command());
}

TEST_F(KvCacheTest, ARestartedCoordinatorGetsTheStepAgain) {
  Start(1, TransportPreference::kRelay);
  ASSERT_TRUE(Step(0, 3).ok());
  ASSERT_TRUE(cache_->BeginStep(OneRow(3, 1)).ok());
  const uint64_t epoch = cache_->epoch();
  fake_->ForgetToken();
  fake_->With([](Faults& faults, Seen&) { faults.breaks = {0}; });
  ASSERT_TRUE(Call(0, 1).ok());
  EXPECT_GT(cache_->epoch(), epoch);
  fake_->With([](Faults&, Seen& seen) {
    ASSERT_EQ(seen.opens.size(), 2u);
    EXPECT_EQ(seen.opens[1].answered_step(), 1u);
  });
  ASSERT_TRUE(Call(1, 1).ok());

  // Layer 0 has been answered, so the workers undo the step.
  ASSERT_TRUE(cache_->BeginStep(OneRow(4, 1)).ok());
  ASSERT_TRUE(Call(0, 1).ok());
  fake_->ForgetToken();
  fake_->With([](Faults& faults, Seen&) { faults.breaks = {0}; });
  const absl::Status status = Call(1, 1);
  EXPECT_EQ(DetailsOf(status).reason, kStepUndone) << status;
  EXPECT_THAT(cache_->sequences(), ElementsAre(Pair(1, 4)));
  ASSERT_TRUE(Step(4, 1).ok());
  EXPECT_EQ(cache_->step(), 3u);
}

TEST_F(KvCacheTest, DeadlinesAndInterruptsLeaveTheCallRepeatable) {
  Start(2, TransportPreference::kDirect);
  ASSERT_TRUE(cache_->BeginStep(OneRow(0, 1)).ok());
  fake_->With([](Faults& faults, Seen&) { faults.stalls = {1}; });
  KvCallOptions options;
  options.deadline = absl::Milliseconds(200);
  EXPECT_TRUE(absl::IsDeadlineExceeded(Call(0, 1, options)));
  fake_->With([](Faults& faults, Seen&) { faults.stalls = {0}; });
  options.deadline = absl::InfiniteDuration();
  options.interrupted = [] { return true; };
  EXPECT_TRUE(absl::IsCancelled(Call(0, 1, options)));
  // The outcome is unknown, so only the same step may follow.
  EXPECT_EQ(DetailsOf(cache_->BeginStep(OneRow(0, 2))).reason, "STEP_CONFLICT");
  EXPECT_TRUE(cache_->BeginStep(OneRow(0, 1)).ok());
  ASSERT_TRUE(Call(0, 1).ok());
  ASSERT_TRUE(Call(1, 1).ok());
}

TEST_F(KvCacheTest, DeadlinesDoNotFollowTheWallClock) {
  Start(2, TransportPreference::kDirect);
  ASSERT_TRUE(cache_->BeginStep(OneRow(0, 1)).ok());
  fake_->With([](Faults& faults, Seen&) { faults.stalls = {1}; });
  KvCallOptions options;
  options.deadline = absl::Milliseconds(500);
  options.interrupted = [] {  // while the call waits
    SetWallClockBack(absl::Hours(2));
    return false;
  };
  const absl::Time begun = MonotonicNow();
  const absl::Status status = Call(0, 1, options);
  SetWallClockBack(absl::ZeroDuration());
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_GE(MonotonicNow() - begun, options.deadline);
  EXPECT_LT(MonotonicNow() - begun, absl::Minutes(1));
}

TEST_F(KvCacheTest, UnreachableWorkersAreReplacedByTheRelay) {
  fake_ = std::make_unique<FakeKvService>(TwoLayers(), 1);
  fake_->With([](Faults& faults, Seen&) { faults.unreachable = true; });
  client_ = *Client::Connect(fake_->address());
  auto cache = KvCache::Create(client_.get(), TwoLayers());
  ASSERT_TRUE(cache.ok()) << cache.status();
  cache_ = *std::move(cache);
  EXPECT_EQ(cache_->transport(), v1::TRANSPORT_RELAY);
  EXPECT_THAT(cache_->transport_reason(), HasSubstr("worker-0"));
  ASSERT_TRUE(Step(0, 3).ok());
  KvOpenOptions direct;
  direct.transport = TransportPreference::kDirect;
  EXPECT_TRUE(absl::IsUnavailable(KvCache::Open(client_.get(), "cache", direct).status()));
}

TEST_F(KvCacheTest, RanksThatDifferEndTheCache) {
  Start(2, TransportPreference::kDirect);
  fake_->With([](Faults& faults, Seen&) { faults.other_tables = {1}; });
  const absl::Status status = Step(0, 1);
  EXPECT_EQ(DetailsOf(status).reason, "KV_RANKS_DIFFER") << status;
  EXPECT_EQ(fake_->With([](Faults&, Seen& seen) { return seen.deletes; }), 1);
  EXPECT_TRUE(IsKvGone(cache_->BeginStep(OneRow(0, 1))));
}

TEST_F(KvCacheTest, WrongArgumentsAreFoundBeforeAnythingIsSent) {
  Start(1, TransportPreference::kDirect);
  EXPECT_EQ(DetailsOf(Call(0, 1)).reason, "STEP_ORDER");
  ASSERT_TRUE(cache_->BeginStep(OneRow(0, 3)).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(Call(0, 2)));
  EXPECT_TRUE(absl::IsInvalidArgument(Call(7, 3)));
  v1::StepBegin tree = OneRow(0, 3);
  tree.mutable_rows(0)->set_tree_mask("x");
  EXPECT_TRUE(absl::IsUnimplemented(cache_->BeginStep(tree)));
  EXPECT_THAT(Messages(), IsEmpty());
  ASSERT_TRUE(Call(0, 3).ok());
  EXPECT_EQ(DetailsOf(cache_->BeginStep(OneRow(3, 1))).reason, "STEP_ORDER");
  EXPECT_EQ(DetailsOf(cache_->CommitStep()).reason, "STEP_ORDER");
  KvOpenOptions options;
  options.transport = TransportPreference::kCudaMemory;
  EXPECT_TRUE(absl::IsInvalidArgument(KvCache::Open(client_.get(), "cache", options).status()));
}

TEST_F(KvCacheTest, OpenCachesAreHeldUntilTheyAreClosed) {
  Start(1, TransportPreference::kDirect);
  const auto await = [&](size_t count) {
    const absl::Time end = MonotonicNow() + absl::Seconds(20);
    while (fake_->With([](Faults&, Seen& seen) { return seen.held.size(); }) != count) {
      ASSERT_LT(MonotonicNow(), end);
      absl::SleepFor(absl::Milliseconds(2));
    }
  };
  await(1);
  cache_->Close();
  await(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(cache_->BeginStep(OneRow(0, 1))));
  EXPECT_TRUE(cache_->Delete().ok());
  EXPECT_EQ(fake_->With([](Faults&, Seen& seen) { return seen.deletes; }), 1);
}

}  // namespace
}  // namespace ringattn::client

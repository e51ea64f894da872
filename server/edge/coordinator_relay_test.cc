// What the relay does at its edges; what flows through it is flow_control_test's.
#include "server/edge/coordinator_relay.h"

#include <atomic>
#include <memory>
#include <string>

#include "common/plan/shard_plan.h"
#include "gtest/gtest.h"
#include "server/edge/test_support.h"

namespace ringattn::server {
namespace {

struct Listener final : TransferListener {
  void OnRoom() override {}
  void OnOutput(grpc::ByteBuffer, int64_t) override {}
  void OnDrained() override {}
  void OnMemberFailed(int rank, const std::string&) override { failed_rank = rank; }

  std::atomic<int> failed_rank = -1;
};

// Of one member at an address where nobody listens.
TransferSpec MakeSpec() {
  TransferSpec spec;
  AttentionShape& shape = spec.request.spec.shape;
  spec.request.spec.dtype = DType::kFloat32;
  shape.batch = shape.seq_len_q = shape.seq_len_kv = shape.num_heads = shape.num_kv_heads = 1;
  shape.head_dim = shape.head_dim_v = 4;
  shape.cu_seqlens_q = shape.cu_seqlens_k = {0, 1};
  spec.request.inputs = {TensorId::kQ, TensorId::kK, TensorId::kV};
  spec.request.outputs = {TensorId::kOut, TensorId::kLse};
  spec.reply.max_chunk_bytes = kMiB;
  spec.accept.request_id = "test";
  spec.shards = MakeShardPlan(spec.request.spec, Layout::kContiguous, 1);
  spec.accept.members = {{1, "worker", "127.0.0.1:1"}};
  return spec;
}

TEST(CoordinatorRelayTest, AMemberThatCannotBeReachedIsToldOf) {
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

// It and its streams refer to one another.
TEST(CoordinatorRelayTest, NothingIsLeftOfOneThatWasStopped) {
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

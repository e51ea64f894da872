// KvCacheService over real sockets, with workers that keep real step logs and compute nothing.
#include "server/edge/kv/kv_relay.h"

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "gtest/gtest.h"
#include "server/edge/testing/fake_kv_worker.h"
#include "server/edge/testing/test_support.h"

namespace ringattn::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMemory = 1 << 20;
constexpr int kHeads = 4;
constexpr int kDim = 16;

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  details.ParseFromString(status.error_details());
  google::rpc::ErrorInfo info;
  for (const auto& detail : details.details()) {
    if (detail.UnpackTo(&info)) return info.reason();
  }
  return status.ok() ? "OK" : "";
}

// "CODE REASON".
std::string Text(const grpc::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code())),
                      " ", ReasonOf(status));
}

// One Steps stream.
class Writer {
 public:
  Writer(v1::KvCacheService::Stub* stub, const std::string& id, uint64_t epoch,
         const std::string& token) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    stream_ = stub->Steps(&context_);
    v1::StepRequest request;
    request.mutable_hello()->set_cache_id(id);
    request.mutable_hello()->set_epoch(epoch);
    request.mutable_hello()->set_token(token);
    stream_->Write(request);
  }
  ~Writer() { context_.TryCancel(); }

  void Send(const v1::StepRequest& request) { stream_->Write(request); }
  // An empty message once the stream has ended.
  v1::StepResponse Read() {
    v1::StepResponse response;
    if (!stream_->Read(&response)) response.Clear();
    return response;
  }
  grpc::Status Finish() {
    stream_->WritesDone();
    return End();
  }
  // Without the client's half-close.
  grpc::Status End() {
    v1::StepResponse response;
    while (stream_->Read(&response)) {
    }
    return stream_->Finish();
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
};

v1::StepRequest BeginOf(uint64_t number, uint64_t length, uint32_t append, uint32_t queries) {
  v1::StepRequest request;
  request.mutable_begin()->set_step(number);
  v1::StepRow* row = request.mutable_begin()->add_rows();
  row->set_sequence(1);
  row->set_expected_length(length);
  row->set_keep_length(length);
  row->set_append_tokens(append);
  row->set_q_tokens(queries);
  return request;
}

// q holds 0, 1, 2, ...; workers answer with their part of it.
v1::StepRequest CallOf(uint64_t number, int append, int queries) {
  v1::StepRequest request;
  request.mutable_call()->set_step(number);
  std::vector<float> q(static_cast<size_t>(queries * kHeads * kDim));
  std::iota(q.begin(), q.end(), 0.0f);
  request.mutable_call()->set_q(
      std::string(reinterpret_cast<const char*>(q.data()), q.size() * sizeof(float)));
  const std::string kv(static_cast<size_t>(append * kHeads * kDim) * sizeof(float), 'k');
  request.mutable_call()->set_k(kv);
  request.mutable_call()->set_v(kv);
  return request;
}

class KvRelayTest : public testing::Test {
 protected:
  KvRelayTest() : cluster_(0) {
    stub_ = v1::KvCacheService::NewStub(cluster_.channel);
    for (const char* name : {"a", "b"}) {
      workers_.push_back(
          std::make_unique<FakeKvWorker>(name, cluster_.server->addresses().control, kMemory));
    }
    WaitUntil([&] { return cluster_.topology().workers_size() == 2; });
  }

  grpc::Status Create(v1::CreateCacheResponse* response, const std::string& request_id = "") {
    v1::CreateCacheRequest request;
    request.set_request_id(request_id);
    request.set_world_size(2);
    v1::KvLayerGroup* group = request.mutable_spec()->add_groups();
    group->add_layers(0);
    group->set_num_heads(kHeads);
    group->set_num_kv_heads(kHeads);
    group->set_head_dim(kDim);
    request.mutable_spec()->set_dtype(v1::DATA_TYPE_FLOAT32);
    request.mutable_spec()->set_blocks(4);
    request.mutable_spec()->set_block_tokens(16);
    grpc::ClientContext context;
    return stub_->CreateCache(&context, request, response);
  }

  std::string CreateOk() {
    v1::CreateCacheResponse response;
    const grpc::Status status = Create(&response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.cache_id();
  }

  grpc::Status Open(const std::string& id, v1::OpenCacheResponse* response,
                    uint64_t answered_step = 0) {
    v1::OpenCacheRequest request;
    request.set_cache_id(id);
    request.set_answered_step(answered_step);
    grpc::ClientContext context;
    return stub_->OpenCache(&context, request, response);
  }

  std::unique_ptr<Writer> OpenWriter(const std::string& id) {
    v1::OpenCacheResponse opened;
    const grpc::Status status = Open(id, &opened);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return std::make_unique<Writer>(stub_.get(), id, opened.epoch(), opened.token());
  }

  v1::KvCacheInfo Get(const std::string& id) {
    v1::GetCacheRequest request;
    request.set_cache_id(id);
    v1::KvCacheInfo info;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->GetCache(&context, request, &info).ok());
    return info;
  }

  TestCluster cluster_;
  std::unique_ptr<v1::KvCacheService::Stub> stub_;
  std::vector<std::unique_ptr<FakeKvWorker>> workers_;
};

TEST_F(KvRelayTest, StepsAreCutByHeadsAndJoined) {
  const std::string id = CreateOk();
  auto writer = OpenWriter(id);
  EXPECT_EQ(writer->Read().opened().next_step(), 1u);
  for (uint64_t step = 1; step <= 3; ++step) {
    writer->Send(BeginOf(step, 2 * (step - 1), 2, 2));
    writer->Send(CallOf(step, 2, 2));  // together with Begin
    const v1::StepResponse accepted = writer->Read();
    EXPECT_EQ(accepted.accepted().step(), step) << accepted.ShortDebugString();
    EXPECT_EQ(accepted.accepted().blocks_free(), 3u);
    const v1::StepResponse result = writer->Read();
    EXPECT_EQ(result.result().out(), CallOf(step, 2, 2).call().q());
  }
  v1::StepRequest commit;
  commit.mutable_commit()->set_step(3);
  writer->Send(commit);
  EXPECT_EQ(writer->Read().committed().step(), 3u);
  EXPECT_TRUE(writer->Finish().ok());
  // A new writer of the cache finds the log as it is.
  writer = OpenWriter(id);
  const v1::StepResponse opened = writer->Read();
  EXPECT_EQ(opened.opened().next_step(), 4u);
  ASSERT_EQ(opened.opened().sequences_size(), 1);
  EXPECT_EQ(opened.opened().sequences(0).length(), 6u);
}

TEST_F(KvRelayTest, TheNextWriterEndsTheStream) {
  const std::string id = CreateOk();
  auto first = OpenWriter(id);
  first->Read();
  auto second = OpenWriter(id);
  EXPECT_TRUE(second->Read().has_opened());
  EXPECT_EQ(Text(first->End()), "ABORTED KV_FENCED");
  second->Send(BeginOf(1, 0, 1, 1));
  EXPECT_TRUE(second->Read().has_accepted());
}

TEST_F(KvRelayTest, WrongTokensAndForeignIdsAreRejected) {
  const std::string id = CreateOk();
  v1::OpenCacheResponse opened;
  ASSERT_TRUE(Open(id, &opened).ok());
  Writer wrong(stub_.get(), id, opened.epoch(), std::string(32, 'x'));
  EXPECT_EQ(Text(wrong.Finish()), "UNAUTHENTICATED BAD_TOKEN");
  Writer unknown(stub_.get(), std::string(16, 'y'), opened.epoch(), opened.token());
  const grpc::Status status = unknown.Finish();
  EXPECT_EQ(Text(status), "NOT_FOUND KV_NOT_FOUND");
  EXPECT_EQ(Text(Open(std::string(16, 'y'), &opened)), "NOT_FOUND KV_NOT_FOUND");
  Writer silent(stub_.get(), id, opened.epoch() + 1, opened.token());
  EXPECT_EQ(Text(silent.Finish()), "UNAUTHENTICATED BAD_TOKEN");
}

TEST_F(KvRelayTest, ALostWorkerEndsTheStreamWithinASecond) {
  auto writer = OpenWriter(CreateOk());
  writer->Read();
  const absl::Time start = absl::Now();
  workers_[1]->Die();
  EXPECT_EQ(Text(writer->End()), "DATA_LOSS KV_LOST");
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
  WaitUntil([&] { return workers_[0]->caches() == 0; });
  EXPECT_EQ(workers_[0]->caches(), 0);
}

TEST_F(KvRelayTest, RanksWithDifferentTablesEndTheCache) {
  const std::string id = CreateOk();
  auto writer = OpenWriter(id);
  writer->Read();
  workers_[1]->set_checksum_error(1);
  writer->Send(BeginOf(1, 0, 1, 1));
  EXPECT_EQ(Text(writer->End()), "DATA_LOSS KV_RANKS_DIFFER");
  EXPECT_TRUE(WaitUntil([&] { return Get(id).has_ended(); }));
}

TEST_F(KvRelayTest, ARefusedStepIsSentAgainUnderTheSameNumber) {
  auto writer = OpenWriter(CreateOk());
  writer->Read();
  writer->Send(BeginOf(1, 7, 1, 1));  // the sequence is new
  writer->Send(CallOf(1, 1, 1));      // skipped
  const v1::StepResponse refused = writer->Read();
  ASSERT_EQ(refused.refused().rows_size(), 1) << refused.ShortDebugString();
  writer->Send(BeginOf(1, 0, 1, 1));
  EXPECT_TRUE(writer->Read().has_accepted());
  writer->Send(CallOf(1, 1, 1));
  EXPECT_TRUE(writer->Read().has_result());
}

TEST_F(KvRelayTest, BadMessagesEndTheStreamByName) {
  const std::string id = CreateOk();
  const auto ends = [&](const v1::StepRequest& request) {
    auto writer = OpenWriter(id);
    writer->Send(request);
    return Text(writer->Finish());
  };
  EXPECT_EQ(ends({}), "INVALID_ARGUMENT BAD_CALL");
  auto empty = OpenWriter(id);
  empty->Send({});
  EXPECT_THAT(empty->Finish().error_message(),
              HasSubstr("the message has no hello, begin, call or commit"));
  EXPECT_EQ(ends(CallOf(1, 1, 1)), "FAILED_PRECONDITION STEP_ORDER");
  EXPECT_EQ(ends(BeginOf(7, 0, 1, 1)), "FAILED_PRECONDITION STEP_ORDER");
  v1::StepRequest tree = BeginOf(1, 0, 1, 1);
  tree.mutable_begin()->mutable_rows(0)->set_tree_mask("m");
  EXPECT_THAT(ends(tree), HasSubstr("UNIMPLEMENTED"));

  const auto call_ends = [&](const std::function<void(v1::LayerCall*)>& change) {
    auto writer = OpenWriter(id);
    writer->Send(BeginOf(1, 0, 1, 1));
    v1::StepRequest request = CallOf(1, 1, 1);
    change(request.mutable_call());
    writer->Send(request);
    return Text(writer->Finish());
  };
  EXPECT_EQ(call_ends([](v1::LayerCall* call) { call->set_layer(9); }),
            "INVALID_ARGUMENT BAD_CALL");
  EXPECT_EQ(call_ends([](v1::LayerCall* call) { call->mutable_q()->pop_back(); }),
            "INVALID_ARGUMENT BAD_CALL");
  EXPECT_EQ(call_ends([](v1::LayerCall* call) { call->set_k(""); }), "INVALID_ARGUMENT BAD_CALL");
  EXPECT_EQ(call_ends([](v1::LayerCall* call) { call->set_output(static_cast<v1::KvOutput>(77)); }),
            "INVALID_ARGUMENT BAD_CALL");
  // The cache has survived all of it.
  auto writer = OpenWriter(id);
  EXPECT_TRUE(writer->Read().has_opened());
}

TEST_F(KvRelayTest, CachesAreListedReadAndDeleted) {
  const std::string first = CreateOk(), second = CreateOk();
  v1::ListCachesRequest request;
  request.set_page_size(1);
  std::vector<std::string> ids;
  do {
    v1::ListCachesResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->ListCaches(&context, request, &response).ok());
    for (const v1::KvCacheInfo& info : response.caches()) ids.push_back(info.cache_id());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(ids, ElementsAre(std::min(first, second), std::max(first, second)));
  EXPECT_THAT(Get(first).placement().members(), ElementsAre("a", "b"));
  const v1::Topology topology = cluster_.topology();
  EXPECT_EQ(topology.workers(0).kv_caches(), 2u);
  EXPECT_EQ(topology.workers(0).kv_cache_bytes(), 2 * Get(first).bytes_per_worker());

  for (int times = 0; times < 2; ++times) {
    v1::DeleteCacheRequest remove;
    remove.set_cache_id(first);
    v1::DeleteCacheResponse removed;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->DeleteCache(&context, remove, &removed).ok());
  }
  EXPECT_EQ(Get(first).ended().code(), static_cast<int>(grpc::StatusCode::FAILED_PRECONDITION));
  v1::OpenCacheResponse opened;
  EXPECT_EQ(Text(Open(first, &opened)), "FAILED_PRECONDITION KV_DELETED");
  EXPECT_TRUE(WaitUntil([&] { return workers_[0]->caches() == 1; }));
}

TEST_F(KvRelayTest, EqualRequestsGetOneCache) {
  v1::CreateCacheResponse first, second;
  ASSERT_TRUE(Create(&first, "r").ok());
  ASSERT_TRUE(Create(&second, "r").ok());
  EXPECT_EQ(first.cache_id(), second.cache_id());
  EXPECT_EQ(workers_[0]->caches(), 1);
}

TEST_F(KvRelayTest, AHoldRenewsLeasesAndReportsEnds) {
  const std::string id = CreateOk();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  auto stream = stub_->HoldCaches(&context);
  v1::HoldCachesRequest request;
  request.add_cache_ids(id);
  request.add_cache_ids(std::string(16, 'y'));
  ASSERT_TRUE(stream->Write(request));
  v1::HoldCachesResponse response;
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_EQ(response.caches_size(), 2);
  EXPECT_EQ(response.caches(0).ended_reason(), "");
  EXPECT_EQ(response.caches(1).ended_reason(), "KV_NOT_FOUND");
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(KvRelayTest, ACacheThatNeverFitsIsRefusedByName) {
  v1::CreateCacheRequest request;
  v1::KvLayerGroup* group = request.mutable_spec()->add_groups();
  group->add_layers(0);
  group->set_num_heads(1);
  group->set_num_kv_heads(1);
  group->set_head_dim(kDim);
  request.mutable_spec()->set_dtype(v1::DATA_TYPE_FLOAT32);
  request.mutable_spec()->set_blocks(1 << 20);
  v1::CreateCacheResponse response;
  grpc::ClientContext context;
  EXPECT_EQ(Text(stub_->CreateCache(&context, request, &response)), "RESOURCE_EXHAUSTED KV_MEMORY");
}

}  // namespace
}  // namespace ringattn::server

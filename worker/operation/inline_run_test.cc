// Inline operations of whole workers: tensors in Reserve and Finished, and no other message.
#include <cstring>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/wire/durations.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/testing/cluster.h"

namespace ringattn::worker {
namespace {

using Message = v1::JoinRequest;
using testing::HasSubstr;

v1::Reserve InlineReserve(const Cluster& cluster, const TestRequest& request,
                          const std::string& id) {
  v1::Reserve reserve = cluster.MakeReserve(request, id, 1);
  std::set<TensorId> tensors;
  for (const auto& [tensor, data] : request.inputs) {
    tensors.insert(ClientTensorOf(request.spec, tensor));
  }
  for (TensorId tensor : tensors) {
    v1::InlineTensor* input = reserve.mutable_inline_run()->add_inputs();
    input->set_tensor(static_cast<v1::TensorId>(tensor));
    input->set_data(request.ClientTensor(tensor));
  }
  return reserve;
}

void Send(Cluster& cluster, const v1::Reserve& reserve) {
  v1::JoinResponse message;
  *message.mutable_reserve() = reserve;
  cluster.coordinator().Send(Cluster::Name(0), message);
}

// Returns the worker's next message that is not a heartbeat, which must be of this kind.
Message AwaitNext(Cluster& cluster, Message::MessageCase kind) {
  const auto message = cluster.coordinator().Await(Cluster::Name(0), kind, absl::Seconds(20));
  EXPECT_TRUE(message.has_value());
  return message.value_or(Message());
}

TensorMap OutputsOf(const TestRequest& request, const v1::Finished& finished) {
  TensorMap outputs;
  for (const auto& [id, tensor] : request.expected) outputs[id].resize(tensor.size());
  for (const v1::TensorChunk& chunk : finished.outputs()) {
    std::vector<uint8_t>& tensor = outputs.at(static_cast<TensorId>(chunk.tensor()));
    if (chunk.offset() + chunk.data().size() > tensor.size()) {
      ADD_FAILURE() << "outside of the tensor";
      continue;
    }
    std::memcpy(tensor.data() + chunk.offset(), chunk.data().data(), chunk.data().size());
  }
  return outputs;
}

// The result has the same bits as that of the ordinary messages. With staged copies, uploads and
// downloads take time, as on a GPU.
TEST(InlineRun, IsOneMessageEachWay) {
  for (Packing packing : {Packing::kNone, Packing::kKv, Packing::kQkv}) {
    for (bool staged : {false, true}) {
      Cluster cluster(1);
      cluster.Form(1);
      if (staged) cluster.device(0).SetStaged(absl::Milliseconds(1), 0);
      for (int64_t tokens : {1, 61}) {
        const TestRequest request = TestRequest::Make(tokens, 1, packing);
        const std::string id = absl::StrCat("1-", tokens);
        Send(cluster, InlineReserve(cluster, request, id));
        const v1::Finished finished = AwaitNext(cluster, Message::kFinished).finished();
        EXPECT_TRUE(finished.ok()) << finished.reason();
        EXPECT_EQ(finished.operation_id(), id);
        EXPECT_TRUE(finished.reserved().ok());
        EXPECT_GT(finished.reserved().bytes(), 0u);
        EXPECT_TRUE(OutputsOf(request, finished) == request.expected);
      }
      ExpectAllFree(cluster);
      for (auto kind : {Message::kReserved, Message::kUploaded, Message::kReleased}) {
        EXPECT_FALSE(cluster.coordinator().Await(Cluster::Name(0), kind, absl::Milliseconds(1)));
      }
    }
  }
}

// The worker sends Finished once the memory is free, so the next operation may use all of it.
TEST(InlineRun, FreesItsMemoryBeforeItAnswers) {
  const TestRequest request = TestRequest::Make(61, 1);
  int64_t bytes = 0;
  {
    Cluster cluster(1);
    cluster.Form(1);
    Send(cluster, InlineReserve(cluster, request, "1-1"));
    bytes = AwaitNext(cluster, Message::kFinished).finished().reserved().bytes();
  }
  Cluster cluster(1, {.memory_limit_bytes = bytes});
  cluster.Form(1);
  for (int i = 1; i <= 50; ++i) {
    Send(cluster, InlineReserve(cluster, request, absl::StrCat("1-", i)));
    EXPECT_TRUE(AwaitNext(cluster, Message::kFinished).finished().ok());
  }
  Send(cluster, InlineReserve(cluster, TestRequest::Make(62, 1), "1-51"));
  const v1::Reserved rejected = AwaitNext(cluster, Message::kReserved).reserved();
  EXPECT_FALSE(rejected.ok());
  EXPECT_FALSE(rejected.malformed());
  cluster.RunToTheEnd(request, "1-52", 1);
  ExpectAllFree(cluster);
}

TEST(InlineRun, RejectsInvalidInputs) {
  Cluster cluster(1);
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(8, 1);
  int next = 0;
  const auto reason = [&](auto change) {
    v1::Reserve reserve = InlineReserve(cluster, request, absl::StrCat("1-", ++next));
    change(*reserve.mutable_inline_run());
    Send(cluster, reserve);
    const v1::Reserved reserved = AwaitNext(cluster, Message::kReserved).reserved();
    EXPECT_FALSE(reserved.ok());
    EXPECT_TRUE(reserved.malformed());
    EXPECT_EQ(reserved.operation_id(), reserve.operation_id());
    return reserved.reason();
  };
  EXPECT_THAT(reason([](v1::InlineRun& run) { run.mutable_inputs(0)->set_data("four"); }),
              HasSubstr("q has 4 bytes; the tensor has 1024"));
  EXPECT_THAT(reason([](v1::InlineRun& run) { run.mutable_inputs()->RemoveLast(); }),
              HasSubstr("an input is missing"));
  EXPECT_THAT(
      reason([](v1::InlineRun& run) { run.mutable_inputs(0)->set_tensor(v1::TENSOR_ID_DOUT); }),
      HasSubstr("is not an input"));
  EXPECT_THAT(reason([](v1::InlineRun& run) { *run.add_inputs() = run.inputs(0); }),
              HasSubstr("overlap"));
  ExpectAllFree(cluster);
}

TEST(InlineRun, HasOneMember) {
  Cluster cluster(2);
  cluster.Form(1);
  Send(cluster, InlineReserve(cluster, TestRequest::Make(8, 2), "1-1"));
  const v1::Reserved reserved = AwaitNext(cluster, Message::kReserved).reserved();
  EXPECT_TRUE(reserved.malformed());
  EXPECT_THAT(reserved.reason(), HasSubstr("more than one member"));
  ExpectAllFree(cluster);
}

TEST(InlineRun, MayPreempt) {
  Cluster cluster(1);
  cluster.Form(1);
  const TestRequest request = TestRequest::Make(8, 1);
  v1::Reserve reserve = InlineReserve(cluster, request, "1-1");
  SetDuration(absl::Milliseconds(1), reserve.mutable_inline_run()->mutable_preempt_after());
  Send(cluster, reserve);
  const v1::Finished finished = AwaitNext(cluster, Message::kFinished).finished();
  EXPECT_TRUE(OutputsOf(request, finished) == request.expected);
}

TEST(InlineRun, EndsWithItsGeneration) {
  Cluster cluster(1);
  cluster.Form(1);
  cluster.device(0).SetStaged(absl::Milliseconds(200), 0);
  Send(cluster, InlineReserve(cluster, TestRequest::Make(61, 1), "1-1"));
  cluster.TearDown(1);
  ExpectAllFree(cluster);
  cluster.device(0).SetStaged(absl::ZeroDuration(), 0);
  cluster.Form(2);
  cluster.RunToTheEnd(TestRequest::Make(61, 1), "2-1", 2);
  ExpectAllFree(cluster);
}

}  // namespace
}  // namespace ringattn::worker

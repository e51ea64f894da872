// Backward calls that read a residual, with and without the residual.
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "client/api/client.h"
#include "client/testing/fake_attention_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Returns gradients of zeros, except for headers whose residual_handle is in `gone`: those get the
// given error.
class BackwardServer final : public v1::AttentionService::Service {
 public:
  explicit BackwardServer(std::map<std::string, FakeError> gone) : gone_(std::move(gone)) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }
  ~BackwardServer() override {
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  }

  grpc::Status Backward(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::BackwardResponse, v1::BackwardRequest>* stream) override {
    v1::BackwardRequest request;
    if (!stream->Read(&request)) return grpc::Status::CANCELLED;
    const v1::BackwardHeader header = request.header();
    headers.push_back(header);
    const auto gone = gone_.find(header.residual_handle());
    if (gone != gone_.end()) return gone->second.ToStatus();
    v1::BackwardResponse response;
    v1::Accepted* accepted = response.mutable_accepted();
    accepted->set_max_chunk_bytes_up(1 << 20);
    std::map<v1::TensorId, uint64_t> outputs;
    for (const v1::TensorId tensor : {v1::TENSOR_ID_DQ, v1::TENSOR_ID_DK, v1::TENSOR_ID_DV}) {
      outputs[tensor] = *TensorBytes(header.shape(), header.dtype(), tensor);
      accepted->add_outputs()->set_tensor(tensor);
      accepted->mutable_outputs()->rbegin()->set_bytes(outputs[tensor]);
    }
    stream->Write(response);
    while (stream->Read(&request)) tensors.push_back(request.chunk().tensor());
    for (const auto& [tensor, bytes] : outputs) {
      v1::BackwardResponse chunk;
      chunk.mutable_chunk()->set_tensor(tensor);
      chunk.mutable_chunk()->set_data(std::string(bytes, '\0'));
      stream->Write(chunk);
    }
    v1::BackwardResponse last;
    last.mutable_summary()->set_flops(1);
    stream->Write(last);
    return grpc::Status::OK;
  }

  const std::string& address() const { return address_; }

  std::vector<v1::BackwardHeader> headers;  // in order of arrival
  std::vector<int> tensors;                 // of the chunks

 private:
  const std::map<std::string, FakeError> gone_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

FakeError Gone(grpc::StatusCode code, const char* reason) {
  return {.code = code, .message = "gone", .reason = reason};
}

class ResidualCall : public testing::Test {
 protected:
  ResidualCall() {
    args_.shape.set_batch(1);
    args_.shape.set_seq_len_q(700);
    args_.shape.set_seq_len_kv(700);
    args_.shape.set_num_heads(2);
    args_.shape.set_head_dim(32);
    args_.dtype = v1::DATA_TYPE_FLOAT32;
    tensor_.resize(700 * 2 * 32);
    lse_.resize(700 * 2);
    dq_ = dk_ = dv_ = tensor_;
    args_.dout = BytesOf(tensor_);
    args_.residual_handle = "handle";
  }
  void GiveTensors() {
    args_.q = args_.k = args_.v = args_.out = BytesOf(tensor_);
    args_.lse = BytesOf(lse_);
    args_.has_forward_result = true;
  }
  CallResult Call(const BackwardServer& server, const CallOptions& options = {}) {
    const auto client = *Client::Connect(server.address());
    return client->Backward(
        args_, {.dq = MutableBytesOf(dq_), .dk = MutableBytesOf(dk_), .dv = MutableBytesOf(dv_)},
        options);
  }

  BackwardArgs args_;
  std::vector<float> tensor_, lse_, dq_, dk_, dv_;
};

TEST_F(ResidualCall, SendsDoutAlone) {
  for (const bool with_tensors : {false, true}) {
    if (with_tensors) GiveTensors();
    args_.keep_residual = with_tensors;
    BackwardServer server({});
    const CallResult report = Call(server);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_THAT(report->residual_failure, IsEmpty());
    EXPECT_EQ(report->summary.attempts(), 1u);
    ASSERT_EQ(server.headers.size(), 1u);
    EXPECT_EQ(server.headers[0].residual_handle(), "handle");
    EXPECT_EQ(server.headers[0].keep_residual(), with_tensors);
    EXPECT_FALSE(server.headers[0].has_forward_result());
    EXPECT_THAT(server.tensors, ElementsAre(v1::TENSOR_ID_DOUT));
  }
}

TEST_F(ResidualCall, SendsTheTensorsIfTheResidualIsLost) {
  const std::pair<grpc::StatusCode, const char*> failures[] = {
      {grpc::StatusCode::FAILED_PRECONDITION, "RESIDUAL_LOST"},
      {grpc::StatusCode::FAILED_PRECONDITION, "RESIDUAL_EXPIRED"},
      {grpc::StatusCode::FAILED_PRECONDITION, "RESIDUAL_CONSUMED"},
      {grpc::StatusCode::NOT_FOUND, "RESIDUAL_NOT_FOUND"}};
  GiveTensors();
  args_.keep_residual = true;
  for (const auto& [code, reason] : failures) {
    BackwardServer server({{"handle", Gone(code, reason)}});
    const CallResult report = Call(server, {.request_id = "one"});
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->residual_failure, reason);
    EXPECT_EQ(report->summary.attempts(), 2u);
    ASSERT_EQ(server.headers.size(), 2u);
    EXPECT_EQ(server.headers[1].request_id(), "one");
    EXPECT_THAT(server.headers[1].residual_handle(), IsEmpty());
    EXPECT_FALSE(server.headers[1].keep_residual());
    EXPECT_TRUE(server.headers[1].has_forward_result());
    EXPECT_EQ(std::set<int>(server.tensors.begin(), server.tensors.end()).size(), 6u);
  }
}

TEST_F(ResidualCall, FailsWithoutTensorsAndForOtherReasons) {
  BackwardServer gone({{"handle", Gone(grpc::StatusCode::FAILED_PRECONDITION, "RESIDUAL_LOST")}});
  const CallResult lost = Call(gone);
  EXPECT_EQ(lost.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailsOf(lost.status()).reason, "RESIDUAL_LOST");
  EXPECT_EQ(gone.headers.size(), 1u);
  GiveTensors();
  BackwardServer other({{"handle", Gone(grpc::StatusCode::FAILED_PRECONDITION, "NOT_PLANNABLE")}});
  EXPECT_EQ(DetailsOf(Call(other).status()).reason, "NOT_PLANNABLE");
  EXPECT_EQ(other.headers.size(), 1u);
}

TEST_F(ResidualCall, InvalidCallsAreRejectedBeforeAnythingIsSent) {
  BackwardServer server({});
  const auto message = [&](const CallOptions& options = {}) {
    const CallResult result = Call(server, options);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(result.status().message());
  };
  EXPECT_THAT(message({.retain = absl::Minutes(1)}), HasSubstr("retain"));
  args_.q = BytesOf(tensor_);  // only one of the tensors
  EXPECT_THAT(message(), HasSubstr("has 0 bytes"));
  args_.q = {};
  args_.dout = BytesOf(lse_);
  EXPECT_THAT(message(), HasSubstr("dout"));
  args_.dout = BytesOf(tensor_);
  args_.residual_handle.clear();
  args_.keep_residual = true;
  EXPECT_THAT(message(), HasSubstr("keep_residual"));
  EXPECT_THAT(server.headers, IsEmpty());
}

TEST_F(ResidualCall, AForwardRequestsARetainAndReportsTheResult) {
  v1::RetainOptions asked;
  FakeAttentionServer server([&](int, const auto& header, auto*, auto* stream) {
    asked = header.retain();
    EXPECT_TRUE(header.has_retain());
    return Echo(header, stream);
  });
  const auto client = *Client::Connect(server.address());
  ForwardArgs args{.shape = args_.shape, .dtype = args_.dtype};
  args.q = args.k = args.v = BytesOf(tensor_);
  const ForwardResults results{.out = MutableBytesOf(dq_), .lse = MutableBytesOf(lse_)};
  ASSERT_TRUE(client->Forward(args, results, {.retain = absl::Milliseconds(1500)}).ok());
  EXPECT_EQ(asked.ttl().seconds(), 1);
  EXPECT_EQ(asked.ttl().nanos(), 500'000'000);
  ASSERT_TRUE(client->Forward(args, results, {.retain = absl::ZeroDuration()}).ok());
  EXPECT_FALSE(asked.has_ttl());
}

}  // namespace
}  // namespace ringattn::client

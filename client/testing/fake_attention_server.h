// An AttentionService for tests of the client, on a free loopback port. A function of the test
// serves each call with the generated synchronous API, so protobuf reads what the client encodes by
// hand.
#ifndef RINGATTN_CLIENT_TESTING_FAKE_ATTENTION_SERVER_H_
#define RINGATTN_CLIENT_TESTING_FAKE_ATTENTION_SERVER_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "client/transfer/tensor_bytes.h"
#include "common/security/credentials.h"
#include "google/protobuf/duration.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "ringattn/v1/attention.grpc.pb.h"

namespace ringattn::client {

// A status with details, as the real server sends it.
struct FakeError {
  grpc::StatusCode code = grpc::StatusCode::UNKNOWN;
  std::string message = {};
  std::string reason = {};
  std::vector<std::pair<std::string, std::string>> violations = {};
  int retry_after_ms = -1;

  grpc::Status ToStatus() const {
    google::rpc::Status status;
    status.set_code(code);
    status.set_message(message);
    if (!violations.empty()) {
      google::rpc::BadRequest bad_request;
      for (const auto& [field, description] : violations) {
        auto* violation = bad_request.add_field_violations();
        violation->set_field(field);
        violation->set_description(description);
      }
      status.add_details()->PackFrom(bad_request);
    }
    if (!reason.empty()) {
      google::rpc::ErrorInfo info;
      info.set_reason(reason);
      info.set_domain("ringattn");
      status.add_details()->PackFrom(info);
    }
    if (retry_after_ms >= 0) {
      google::rpc::RetryInfo retry;
      retry.mutable_retry_delay()->set_seconds(retry_after_ms / 1000);
      retry.mutable_retry_delay()->set_nanos(retry_after_ms % 1000 * 1'000'000);
      status.add_details()->PackFrom(retry);
    }
    return grpc::Status(code, message, status.SerializeAsString());
  }
};

using ForwardStream = grpc::ServerReaderWriter<v1::ForwardResponse, v1::ForwardRequest>;

class FakeAttentionServer final : public v1::AttentionService::Service {
 public:
  // Called per stream with the call's index, from 0, and its header.
  using Handler = std::function<grpc::Status(int call, const v1::ForwardHeader& header,
                                             grpc::ServerContext* context, ForwardStream* stream)>;

  // `beside`: another service on the same address, which must outlive this; may be null.
  explicit FakeAttentionServer(Handler handler, grpc::Service* beside = nullptr)
      : handler_(std::move(handler)) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(32 << 20);
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.RegisterService(this);
    if (beside != nullptr) builder.RegisterService(beside);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }

  ~FakeAttentionServer() override {
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  }

  const std::string& address() const { return address_; }
  int calls() const { return calls_; }

  grpc::Status Forward(grpc::ServerContext* context, ForwardStream* stream) override {
    v1::ForwardRequest request;
    if (!stream->Read(&request) || !request.has_header()) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no header");
    }
    return handler_(calls_++, request.header(), context, stream);
  }

 private:
  const Handler handler_;
  std::atomic<int> calls_{0};
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

// --- Building blocks of handlers ----------------------------------------------

inline v1::ForwardResponse AcceptedFor(const v1::ForwardHeader& header) {
  v1::ForwardResponse response;
  v1::Accepted* accepted = response.mutable_accepted();
  accepted->set_request_id(header.request_id());
  accepted->set_max_chunk_bytes_up(1 << 20);
  accepted->set_max_chunk_bytes_down(header.reply().max_chunk_bytes());
  for (const v1::TensorId tensor : {v1::TENSOR_ID_OUT, v1::TENSOR_ID_LSE}) {
    v1::TensorDescriptor* output = accepted->add_outputs();
    output->set_tensor(tensor);
    output->set_bytes(
        *TensorBytes(header.shape(), {header.dtype(), header.reply().output_dtype()}, tensor));
  }
  return response;
}

// Reads chunks until the client half-closes. Returns the tensors' bytes, inline ones included.
inline std::map<int, std::string> ReadUpload(const v1::ForwardHeader& header,
                                             ForwardStream* stream) {
  std::map<int, std::string> tensors;
  for (const v1::TensorId tensor : {v1::TENSOR_ID_Q, v1::TENSOR_ID_K, v1::TENSOR_ID_V}) {
    tensors[tensor].resize(
        *TensorBytes(header.shape(), {header.dtype(), header.reply().output_dtype()}, tensor));
  }
  for (const v1::InlineTensor& tensor : header.inline_tensors()) {
    tensors[tensor.tensor()] = tensor.data();
  }
  v1::ForwardRequest request;
  while (stream->Read(&request)) {
    const v1::TensorChunk& chunk = request.chunk();
    tensors[chunk.tensor()].replace(chunk.offset(), chunk.data().size(), chunk.data());
  }
  return tensors;
}

inline bool SendChunk(ForwardStream* stream, v1::TensorId tensor, uint64_t offset,
                      const std::string& data) {
  v1::ForwardResponse response;
  response.mutable_chunk()->set_tensor(tensor);
  response.mutable_chunk()->set_offset(offset);
  response.mutable_chunk()->set_data(data);
  return stream->Write(response);
}

// Returns out = q and lse = zeros, which fits any shape with head_dim_v == head_dim.
inline grpc::Status Echo(const v1::ForwardHeader& header, ForwardStream* stream) {
  stream->Write(AcceptedFor(header));
  const std::map<int, std::string> tensors = ReadUpload(header, stream);
  const std::string& q = tensors.at(v1::TENSOR_ID_Q);
  constexpr size_t kChunkBytes = 300'000;
  for (size_t at = 0; at < q.size(); at += kChunkBytes) {
    SendChunk(stream, v1::TENSOR_ID_OUT, at, q.substr(at, kChunkBytes));
  }
  const uint64_t lse_bytes = *TensorBytes(header.shape(), header.dtype(), v1::TENSOR_ID_LSE);
  SendChunk(stream, v1::TENSOR_ID_LSE, 0, std::string(lse_bytes, '\0'));
  v1::ForwardResponse last;
  last.mutable_summary()->set_flops(1);
  stream->Write(last);
  return grpc::Status::OK;
}

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TESTING_FAKE_ATTENTION_SERVER_H_

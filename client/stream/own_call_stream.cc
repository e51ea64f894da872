#include <utility>

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include "client/stream/call_stream.h"
#include "common/observability/trace_context.h"

namespace ringattn::client {
namespace {

class OwnCallStream final : public CallStream,
                            public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  OwnCallStream(std::shared_ptr<grpc::Channel> channel, BearerToken* token,
                const CallStreamOptions& options, User* user)
      : stub_(std::move(channel)), user_(user) {
    context_.set_deadline(options.deadline);
    context_.set_initial_metadata_corked(true);  // the header is written at once
    if (token != nullptr) token->AddTo(&context_);
    if (!options.traceparent.empty()) context_.AddMetadata(kTraceparentKey, options.traceparent);
    stub_.PrepareBidiStreamingCall(&context_, MethodOf(options.kind), {}, this);
  }

  void Start() override { StartCall(); }
  void Read(grpc::ByteBuffer* message) override { StartRead(message); }
  void Write(const grpc::ByteBuffer* message) override { StartWrite(message); }
  void WriteLast(const grpc::ByteBuffer* message) override {
    StartWriteLast(message, grpc::WriteOptions());
  }
  void WritesDone() override { StartWritesDone(); }
  void TryCancel() override { context_.TryCancel(); }

 private:
  void OnReadDone(bool ok) override { user_->OnReadDone(ok); }
  void OnWriteDone(bool ok) override { user_->OnWriteDone(ok); }
  // May destroy this.
  void OnDone(const grpc::Status& status) override { user_->OnDone(status); }

  grpc::GenericStub stub_;
  User* const user_;
  grpc::ClientContext context_;
};

}  // namespace

std::unique_ptr<CallStream> MakeOwnCallStream(std::shared_ptr<grpc::Channel> channel,
                                              BearerToken* token, const CallStreamOptions& options,
                                              CallStream::User* user) {
  return std::make_unique<OwnCallStream>(std::move(channel), token, options, user);
}

}  // namespace ringattn::client

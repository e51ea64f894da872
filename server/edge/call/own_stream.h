// OwnStream: a Forward or Backward call on a separate RPC.
#ifndef RINGATTN_SERVER_EDGE_CALL_OWN_STREAM_H_
#define RINGATTN_SERVER_EDGE_CALL_OWN_STREAM_H_

#include <grpc/grpc.h>

#include "server/edge/call/client_stream.h"

namespace ringattn::server {

// Deletes itself after User::OnDone.
class OwnStream final : public ByteStreamReactor, public ClientStream {
 public:
  explicit OwnStream(grpc::CallbackServerContext* call) : call_(call) {}

  void SetUser(User* user) override { user_ = user; }
  void Read(grpc::ByteBuffer* message) override { StartRead(message); }
  void Write(const grpc::ByteBuffer* message, bool more_follows) override {
    grpc::WriteOptions options;
    if (more_follows) options.set_buffer_hint();
    StartWrite(message, options);
  }
  void WriteAndFinish(const grpc::ByteBuffer* message, const grpc::Status& status) override {
    StartWriteAndFinish(message, grpc::WriteOptions(), status);
  }
  void Finish(const grpc::Status& status) override { ByteStreamReactor::Finish(status); }

  bool IsCancelled() const override { return call_->IsCancelled(); }
  void TryCancel() override { call_->TryCancel(); }
  // TryCancel alone would send CANCELLED. The status arrives with code and message, but without
  // details.
  void CutOff(const grpc::Status& status) override {
    grpc_call_cancel_with_status(call_->c_call(),
                                 static_cast<grpc_status_code>(status.error_code()),
                                 status.error_message().c_str(), nullptr);
  }

 private:
  void OnReadDone(bool ok) override { user_->OnReadDone(ok); }
  void OnWriteDone(bool ok) override { user_->OnWriteDone(ok); }
  void OnCancel() override { user_->OnCancel(); }
  void OnDone() override {
    user_->OnDone();
    delete this;
  }

  grpc::CallbackServerContext* const call_;
  User* user_ = nullptr;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_OWN_STREAM_H_

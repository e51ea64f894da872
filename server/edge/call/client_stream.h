// ClientStream: the stream of one Forward or Backward call, as RequestCall uses it. It is an RPC of
// its own (own_stream.h) or one of many on an RPC (shared_calls.h).
#ifndef RINGATTN_SERVER_EDGE_CALL_CLIENT_STREAM_H_
#define RINGATTN_SERVER_EDGE_CALL_CLIENT_STREAM_H_

#include <string>

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include "absl/time/time.h"

namespace ringattn::server {

using ByteStreamReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

// The rules are those of a gRPC reactor: one read and one write at a time, Finish once, and nothing
// starts after it. Starting may call the user back at once, so the caller holds no lock that the
// callbacks take. IsCancelled, TryCancel and CutOff never call back. Thread safe otherwise.
class ClientStream {
 public:
  class User {
   public:
    virtual ~User() = default;
    virtual void OnReadDone(bool ok) = 0;
    virtual void OnWriteDone(bool ok) = 0;
    // The client cancelled, its deadline passed or its connection broke.
    virtual void OnCancel() = 0;
    // The last call, after Finish. The stream may be destroyed with its return.
    virtual void OnDone() = 0;
  };

  virtual ~ClientStream() = default;

  // Call once, before anything else. `user` lives until its OnDone.
  virtual void SetUser(User* user) = 0;

  virtual void Read(grpc::ByteBuffer* message) = 0;
  // `more_follows`: the message need not leave before the next one.
  virtual void Write(const grpc::ByteBuffer* message, bool more_follows) = 0;
  // OnWriteDone does not follow.
  virtual void WriteAndFinish(const grpc::ByteBuffer* message, const grpc::Status& status) = 0;
  virtual void Finish(const grpc::Status& status) = 0;

  virtual bool IsCancelled() const = 0;
  // The client does not read. Ends the outstanding write.
  virtual void TryCancel() = 0;
  // The same, and the client receives this status if it can.
  virtual void CutOff(const grpc::Status& status) = 0;
};

// A call before its first message.
struct CallOrigin {
  absl::Time deadline = absl::InfiniteFuture();  // monotonic
  std::string traceparent;                       // W3C trace context; empty: none
  // Several calls begin together, and CoreLoop::HandleQueued() is called after the last.
  bool is_one_of_several = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_CLIENT_STREAM_H_

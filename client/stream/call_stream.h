// CallStream: the stream of one call to the coordinator, as an attempt uses it. It is a separate
// RPC (OwnCallStream) or one of many on an RPC (call_sharer.h).
#ifndef RINGATTN_CLIENT_STREAM_CALL_STREAM_H_
#define RINGATTN_CLIENT_STREAM_CALL_STREAM_H_

#include <chrono>
#include <memory>
#include <string>

#include <grpcpp/channel.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include "client/stream/stream_messages.h"
#include "common/security/bearer_token.h"

namespace ringattn::client {

// The rules are those of a gRPC reactor: one read and one write at a time. Reading and starting may
// call the user back at once. Thread safe otherwise. Destroyed in or after OnDone, or if it never
// started.
class CallStream {
 public:
  class User {
   public:
    virtual ~User() = default;
    virtual void OnReadDone(bool ok) = 0;
    virtual void OnWriteDone(bool ok) = 0;
    // The last call, once all others have returned.
    virtual void OnDone(const grpc::Status& status) = 0;
  };

  virtual ~CallStream() = default;

  // Begins the call. The first read and the first write come before it.
  virtual void Start() = 0;
  // The messages stay the caller's until OnReadDone or OnWriteDone.
  virtual void Read(grpc::ByteBuffer* message) = 0;
  virtual void Write(const grpc::ByteBuffer* message) = 0;
  // The same, and half-closes.
  virtual void WriteLast(const grpc::ByteBuffer* message) = 0;
  virtual void WritesDone() = 0;
  // Ends the call soon, with CANCELLED unless it has just ended. Idempotent. Does not call back.
  virtual void TryCancel() = 0;
};

struct CallStreamOptions {
  CallKind kind = CallKind::kForward;
  std::chrono::system_clock::time_point deadline = std::chrono::system_clock::time_point::max();
  std::string traceparent = {};  // empty: none
};

// `token` may be null. `user` lives until its OnDone.
std::unique_ptr<CallStream> MakeOwnCallStream(std::shared_ptr<grpc::Channel> channel,
                                              BearerToken* token, const CallStreamOptions& options,
                                              CallStream::User* user);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_STREAM_CALL_STREAM_H_

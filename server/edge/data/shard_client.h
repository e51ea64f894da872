// The coordinator's side of ShardService: channels to workers, and one Exchange stream per request
// and member, as raw byte buffers.
#ifndef RINGATTN_SERVER_EDGE_DATA_SHARD_CLIENT_H_
#define RINGATTN_SERVER_EDGE_DATA_SHARD_CLIENT_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/base/limits.h"
#include "common/security/credentials.h"
#include "common/wire/grpc_1_51/resting_threads.h"
#include "ringattn/v1/shard.pb.h"

namespace ringattn::server {

// Channels by data address. Several per worker, because one HTTP/2 connection does not saturate a
// link. Thread safe.
class ShardChannels {
 public:
  ShardChannels(const Limits& limits, const TransportSecurity& security)
      : limits_(limits), security_(security) {}

  // Returns the worker's channels in rotation.
  std::shared_ptr<grpc::Channel> Next(const std::string& address);
  // Closes all channels to other addresses once their streams have ended.
  void Keep(const std::set<std::string>& addresses);

 private:
  static constexpr int kChannelsPerWorker = 4;
  struct Worker {
    std::vector<std::shared_ptr<grpc::Channel>> channels;
    int next = 0;
  };

  const Limits limits_;
  const TransportSecurity security_;
  absl::Mutex mutex_;
  std::map<std::string, Worker> workers_ ABSL_GUARDED_BY(mutex_);
};

// Receives a stream's events. Called from gRPC's threads, never under the stream's lock, with one
// call at a time of each kind. A message's call may overlap the previous message's once the next
// message was requested by Read.
class ShardStreamOwner {
 public:
  virtual ~ShardStreamOwner() = default;
  virtual void OnShardMessage(int rank, grpc::ByteBuffer message) = 0;
  // This many payload bytes passed to Write have left this process.
  virtual void OnShardWritten(int rank, int64_t payload_bytes) = 0;
  // The last call. OK only if the worker completed the stream.
  virtual void OnShardEnded(int rank, const grpc::Status& status) = 0;
};

// One Exchange stream. Keeps itself and its owner alive until OnShardEnded. Thread safe. Its lock
// is taken after its owner's and held only briefly; gRPC's work on a message, which may take as
// long as the message is large, runs without it.
class ShardStream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Returns a stream that sends `open` and requests one message.
  static std::shared_ptr<ShardStream> Make(std::shared_ptr<ShardStreamOwner> owner, int rank,
                                           std::shared_ptr<grpc::Channel> channel,
                                           const std::string& secret, const v1::OpenShard& open);

  ShardStream(const ShardStream&) = delete;
  ShardStream& operator=(const ShardStream&) = delete;

  // Starts the call, whose events may arrive before this returns. REQUIRES: called once, before all
  // others.
  void Begin() { StartCall(); }
  // Messages are sent in order. `payload_bytes` is reported by OnShardWritten.
  void Write(grpc::ByteBuffer message, int64_t payload_bytes);
  // Half-closes after the queued messages.
  void WritesDone();
  // Requests one more message. REQUIRES: no request is outstanding.
  void Read();
  // Ends the stream. Idempotent.
  void Cancel();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  struct Outgoing {
    grpc::ByteBuffer message;
    int64_t payload_bytes = 0;
  };

  ShardStream(std::shared_ptr<ShardStreamOwner> owner, int rank,
              std::shared_ptr<grpc::Channel> channel);

  enum class Next { kNothing, kRead, kWrite, kHalfClose };

  // Returns the next write, if one may start, and adds a hold for it.
  Next TakeWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts the write and removes its hold.
  void Start(Next next) ABSL_LOCKS_EXCLUDED(mutex_);
  // Prevents further operations, so that the stream may end.
  void Close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const wire::ManyCallbacks many_callbacks_;  // of tensors that pass through
  std::shared_ptr<ShardStreamOwner> owner_;   // until OnDone; it refers to this stream too
  const int rank_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_;  // of the outstanding read
  std::shared_ptr<ShardStream> self_;

  absl::Mutex mutex_;
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);
  Outgoing in_flight_;  // owned by the thread that set writing_, until OnWriteDone
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_close_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_SHARD_CLIENT_H_

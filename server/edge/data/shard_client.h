// The coordinator's side of ShardService: channels to workers and one Exchange
// stream per request and member, as raw byte buffers.
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
#include "ringattn/v1/shard.pb.h"

namespace ringattn::server {

// Channels by data address; a few per worker, because one HTTP/2 connection does not
// fill a link. Thread safe.
class ShardChannels {
 public:
  ShardChannels(const Limits& limits, const TransportSecurity& security)
      : limits_(limits), security_(security) {}

  // The worker's channels in turn.
  std::shared_ptr<grpc::Channel> Next(const std::string& address);
  // Closes (once their streams end) the channels to all others.
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

// Who hears about a stream. Called from gRPC's threads, never under the stream's
// lock, one call at a time of each kind; but a message's may begin before the last one's has
// returned, once the next was asked for (Read).
class ShardStreamOwner {
 public:
  virtual ~ShardStreamOwner() = default;
  virtual void OnShardMessage(int rank, grpc::ByteBuffer message) = 0;
  // `payload_bytes` of those given to Write have left this process.
  virtual void OnShardWritten(int rank, int64_t payload_bytes) = 0;
  // Last. OK only if the worker ended the stream in good order.
  virtual void OnShardEnded(int rank, const grpc::Status& status) = 0;
};

// One Exchange stream. Keeps itself and its owner alive until OnShardEnded. Thread safe; its
// lock is taken after its owner's and held for moments only: gRPC's own work for a message,
// which may be as long as the message, is done without it.
class ShardStream final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // One that will ask for what `open` says, and for one message.
  static std::shared_ptr<ShardStream> Make(std::shared_ptr<ShardStreamOwner> owner, int rank,
                                           std::shared_ptr<grpc::Channel> channel,
                                           const std::string& secret, const v1::OpenShard& open);

  ShardStream(const ShardStream&) = delete;
  ShardStream& operator=(const ShardStream&) = delete;

  // Starts the call; the owner may hear of it before this returns. REQUIRES: once, first of all.
  void Begin() { StartCall(); }
  // Messages go out in order. Payload counts for OnShardWritten.
  void Write(grpc::ByteBuffer message, int64_t payload_bytes);
  // Half-closes after what is queued.
  void WritesDone();
  // Asks for one message more. REQUIRES: none asked for is outstanding.
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

  // What is to be written next, if anything may be, with a hold of its own.
  Next TakeWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts what was taken, and lets go of its hold.
  void Start(Next next) ABSL_LOCKS_EXCLUDED(mutex_);
  // No operation is started any more, so the stream may end.
  void Close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::shared_ptr<ShardStreamOwner> owner_;  // until OnDone; it refers to this stream too
  const int rank_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_;  // of the read that is outstanding
  std::shared_ptr<ShardStream> self_;

  absl::Mutex mutex_;
  std::deque<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);
  Outgoing in_flight_;  // of whoever set writing_, until OnWriteDone
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_close_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_SHARD_CLIENT_H_

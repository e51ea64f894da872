// CallSharer: lets calls of one channel share streams of AttentionService.Calls, which costs client
// and coordinator less time than an RPC for each call. A further stream is opened only when those
// before it are full: calls that share few streams leave in few messages.
//
// Tests: call_sharer_test.cc
#ifndef RINGATTN_CLIENT_STREAM_CALL_SHARER_H_
#define RINGATTN_CLIENT_STREAM_CALL_SHARER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/channel.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/stream/call_stream.h"
#include "common/security/bearer_token.h"

namespace ringattn::client {

class SharedStream;

// Thread safe. Opens no stream before a server has answered that it serves Calls.
class CallSharer {
 public:
  // A stream without calls ends after `idle`.
  struct Options {
    // With a server's default limits, a client has fewer calls in progress than these can hold.
    int most_streams = 4;
    absl::Duration idle = absl::Seconds(10);
    // A server that does not answer ends no call. The client then does so this long after the
    // call's deadline, or after its cancellation.
    absl::Duration grace = absl::Milliseconds(500);
    absl::Duration cancel_grace = absl::Seconds(5);
    // No stream is opened for this long after the server has refused one. Others remain in use.
    absl::Duration refused_pause = absl::Seconds(30);
  };

  // `token` may be null.
  CallSharer(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token,
             const Options& options);
  CallSharer(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token)
      : CallSharer(std::move(channel), std::move(token), Options()) {}
  // Ends the streams and waits until gRPC has released them. REQUIRES: all calls have ended.
  ~CallSharer();

  // Takes Accepted.max_calls_per_stream of an answer. 0: the server has no Calls.
  void Learn(uint32_t max_calls) ABSL_LOCKS_EXCLUDED(mutex_);

  // Returns a stream for a call that sends a header only, or null if the call needs an RPC of its
  // own: the server has no Calls as far as is known, or all streams have as many calls as the
  // server serves at the same time. `user` lives until its OnDone.
  std::unique_ptr<CallStream> Open(const CallStreamOptions& options, CallStream::User* user)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class SharedStream;

  // Closes and returns the current streams that begin no further call, or all of them if they were
  // opened with another token.
  std::vector<std::shared_ptr<SharedStream>> TakeOver(const std::string& token)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<SharedStream> OpenStream(std::string token) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The server does not serve the stream.
  void Refused(bool lacks_calls) ABSL_LOCKS_EXCLUDED(mutex_);
  void Released() ABSL_LOCKS_EXCLUDED(mutex_);
  bool IsReleased() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return streams_ == 0; }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::shared_ptr<BearerToken> token_;
  const Options options_;
  absl::Mutex mutex_;
  uint32_t max_calls_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: not known, or none
  absl::Time not_before_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  // Those that begin calls, in the order in which they are filled.
  std::vector<std::shared_ptr<SharedStream>> current_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<SharedStream>> all_ ABSL_GUARDED_BY(mutex_);
  std::string current_token_ ABSL_GUARDED_BY(mutex_);  // with which current_ were opened
  int streams_ ABSL_GUARDED_BY(mutex_) = 0;            // that gRPC has not released
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_STREAM_CALL_SHARER_H_

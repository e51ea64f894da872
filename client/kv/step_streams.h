// StepStreams: the streams of one writer, one to each peer, used in lockstep. With step rings,
// messages that fit travel in the rings, and the streams report errors and the ends of peers.
#ifndef RINGATTN_CLIENT_KV_STEP_STREAMS_H_
#define RINGATTN_CLIENT_KV_STEP_STREAMS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/completion_queue.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/kv/step_rings.h"
#include "client/kv/step_stream.h"
#include "common/security/bearer_token.h"
#include "ringattn/v1/kv_cache.pb.h"

namespace ringattn::client {

// Not thread safe.
class StepStreams {
 public:
  struct Limits {
    absl::Time deadline = absl::InfiniteFuture();        // of MonotonicNow
    const std::function<bool()>* interrupted = nullptr;  // null or empty: never
  };

  // `token` may be null; it goes to the coordinator only. `rings`, of the same ranks, may be null.
  // Opens nothing.
  StepStreams(std::vector<StepStream::Peer> peers, std::shared_ptr<BearerToken> token,
              std::shared_ptr<StepRings> rings = nullptr);
  ~StepStreams();

  StepStreams(const StepStreams&) = delete;
  StepStreams& operator=(const StepStreams&) = delete;

  size_t size() const { return peers_.size(); }
  bool is_open() const { return !streams_.empty(); }

  // Opens the streams and returns every peer's StepOpened. Requires !is_open().
  absl::StatusOr<std::vector<v1::StepOpened>> Open(const Limits& limits);

  // Requests by peer. They are only read, and not after Exchange has returned.
  using Requests = std::vector<std::vector<const v1::StepRequest*>>;

  // Sends requests[i] to peer i and returns every peer's answers. A peer answers all requests, or
  // only the first if that was refused. `result_bytes`: at least the tensor bytes of each answer.
  // After an error the streams are closed. Errors: a peer's status, with its name;
  // DEADLINE_EXCEEDED; CANCELLED. Requires is_open().
  absl::StatusOr<std::vector<std::vector<v1::StepResponse>>> Exchange(const Requests& requests,
                                                                      int64_t result_bytes,
                                                                      const Limits& limits);

  // Cancels all streams and waits until they have ended.
  void Close();

 private:
  using Answers = std::vector<std::vector<v1::StepResponse>>;  // by peer

  bool FitRings(const Requests& requests, int64_t result_bytes) const;
  absl::StatusOr<Answers> ExchangeInRings(const Requests& requests, const Limits& limits);
  // Takes answers until every peer has answered `count` requests. Takes those of one peer while
  // others compute.
  absl::Status AwaitRings(size_t count, const Limits& limits, Answers* answers);
  // Takes the answers that the peer's ring has, at most `missing`, which it reduces.
  absl::Status TakeFromRing(size_t peer, size_t* missing, std::vector<v1::StepResponse>* answers);
  // Handles what has happened on the streams. Never blocks.
  void PollStreams();
  // Waits until every stream has its answers, given by `count`, or one has ended.
  absl::StatusOr<std::vector<std::vector<v1::StepResponse>>> Await(size_t count,
                                                                   const Limits& limits);
  // Status of the first ended stream whose answers are missing; one that a peer chose goes first.
  absl::Status EndOfStreams(const std::vector<std::vector<v1::StepResponse>>& answers,
                            size_t count) const;

  const std::vector<StepStream::Peer> peers_;
  const std::shared_ptr<BearerToken> token_;
  const std::shared_ptr<StepRings> rings_;  // null: none
  absl::Time polled_ = absl::InfinitePast();
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<StepStream>> streams_;  // by peer; empty: closed
};

// True for a status that a peer chose; false for one that reports a broken connection, after which
// the same messages may be sent again on another stream.
bool IsVerdict(const absl::Status& status);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_KV_STEP_STREAMS_H_

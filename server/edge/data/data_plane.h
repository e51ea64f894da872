// DataPlane: moves one accepted operation's tensors between the client and the members. The
// call (request_call.h) owns one from Accepted to the status; how the bytes travel is the
// implementation's: CoordinatorRelay takes them through this process.
#ifndef RINGATTN_SERVER_EDGE_DATA_DATA_PLANE_H_
#define RINGATTN_SERVER_EDGE_DATA_DATA_PLANE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/support/byte_buffer.h>

#include "server/core/events/events.h"
#include "server/edge/header/header_translation.h"

namespace ringattn::server {

// What is to be moved, and for whom.
struct TransferSpec {
  Direction direction = Direction::kForward;
  ValidRequest request;
  ReplyChoice reply;
  std::vector<InlineData> inline_tensors;  // came with the header
  AcceptRequest accept;                    // members
  ShardPlan shards;                        // who of them holds which tokens
  std::string traceparent = {};            // for logs; empty: none
};

// Tensor bytes so far, inputs up and outputs down.
struct TransferTotals {
  int64_t received_bytes = 0;
  int64_t bytes_up = 0;  // when all have arrived
  int64_t sent_bytes = 0;
  int64_t bytes_down = 0;
};

// Who keeps the transfer from moving.
struct TransferStalls {
  // Members that were waited for since the last look and took or sent nothing.
  std::vector<int> members;
  // The client likewise: its next bytes could be taken, or bytes wait for it.
  bool client = false;
  // Its next input bytes could be taken now.
  bool waits_for_input = false;
  // False: nothing passes here that could be looked at; the members tell the core themselves who
  // stands. `waits_for_input` is known nevertheless.
  bool known = true;
};

// The call, as the data plane sees it. Called on any thread, never under a lock of the plane
// that Look, Wants or Stop take.
class TransferListener {
 public:
  virtual ~TransferListener() = default;
  // Wants() may have become true.
  virtual void OnRoom() = 0;
  // A message for the client's stream. Delivered() follows once it has left this process.
  virtual void OnOutput(grpc::ByteBuffer message, int64_t payload_bytes) = 0;
  // Everything has been delivered. Once, and only after Drain().
  virtual void OnDrained() = 0;
  // The transfer with a member failed although the member's control connection lives.
  virtual void OnMemberFailed(int rank, const std::string& reason) = 0;
};

// Thread safe, but for what Open, Feed and Incomplete say. Look, Wants, totals and Stop hold
// locks for moments only and never wait for payload: the core's thread calls them. All others
// work on payload and are not for that thread.
class DataPlane {
 public:
  virtual ~DataPlane() = default;

  // Connects to the members and passes the inline tensors on. What is wrong with those, if
  // anything. Called once, before Feed.
  virtual std::optional<Failure> Open() = 0;

  // A message of the client's stream after the header: passes it on, or says what is wrong
  // with it. One call at a time, not beside Open.
  virtual std::optional<Failure> Feed(const grpc::ByteBuffer& message) = 0;
  // There is room for another message, if only to refuse what is too much.
  virtual bool Wants() const = 0;
  // All inputs have come.
  virtual bool complete() const = 0;
  // What is missing. REQUIRES: !complete() and no Feed or Open runs.
  virtual Failure Incomplete() const = 0;

  // The members have computed: their outputs may go to the client. Once.
  virtual void Drain() = 0;
  // So many bytes given to OnOutput have left this process.
  virtual void Delivered(int64_t payload_bytes) = 0;

  // Called from time to time while the transfer lasts.
  virtual TransferStalls Look() = 0;
  virtual TransferTotals totals() const = 0;
  // The members say how far they are: where the bytes do not pass here.
  virtual void Advanced(const TransferAdvanced& advanced) {}
  // The request has succeeded: everything is where it belongs.
  virtual void Succeeded() {}

  // Ends all traffic. No call of the listener begins after it that matters; idempotent.
  virtual void Stop() = 0;
};

using MakeDataPlane =
    std::function<std::shared_ptr<DataPlane>(TransferSpec, std::shared_ptr<TransferListener>)>;

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_DATA_PLANE_H_

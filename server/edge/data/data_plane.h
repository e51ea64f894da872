// DataPlane: moves one accepted operation's tensors between the client and the members. The call
// (request_call.h) owns one from Accepted to the status. Implementations differ in the transport;
// CoordinatorRelay forwards the bytes through this process.
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

// The tensors to move, and between whom.
struct TransferSpec {
  Direction direction = Direction::kForward;
  ValidRequest request;
  ReplyChoice reply;
  // From the header; not null.
  std::shared_ptr<const InlineTensors> inline_tensors = std::make_shared<const InlineTensors>();
  AcceptRequest accept;          // with the members
  ShardPlan shards;              // with spans
  std::string traceparent = {};  // for logs; empty: none
};

// Tensor bytes so far: inputs up and outputs down.
struct TransferTotals {
  int64_t received_bytes = 0;
  int64_t bytes_up = 0;  // once all have arrived
  int64_t sent_bytes = 0;
  int64_t bytes_down = 0;
};

// The parties that hold up the transfer.
struct TransferStalls {
  // Members that had work since the last look and moved nothing.
  std::vector<int> members;
  // The client had work and moved nothing: the server could take its bytes, or has bytes for it.
  bool client = false;
  // The client's next input bytes could be taken now.
  bool waits_for_input = false;
  // False if the tensors bypass this process; the members then report stalls to the core.
  // `waits_for_input` is valid nevertheless.
  bool known = true;
};

// The call, as the data plane uses it. Called on any thread, never under a lock that Look, HasRoom
// or Stop take.
class TransferListener {
 public:
  virtual ~TransferListener() = default;
  // HasRoom() may have become true.
  virtual void OnRoom() = 0;
  // A message for the client's stream. The call reports Delivered() once it has left this process.
  virtual void OnOutput(grpc::ByteBuffer message, int64_t payload_bytes) = 0;
  // Everything has been delivered. Called once, after Drain().
  virtual void OnDrained() = 0;
  // The transfer with a member failed although its control stream is open.
  virtual void OnMemberFailed(int rank, const std::string& reason) = 0;
};

// Thread safe, with the exceptions stated at Open, Feed and Incomplete. The core's thread calls
// Look, HasRoom, totals and Stop, which hold locks only briefly and never wait for payload. All
// other functions handle payload and must not run on that thread.
class DataPlane {
 public:
  virtual ~DataPlane() = default;

  // Connects to the members and sends the inline tensors. Returns the failure if those are invalid.
  // Called once, before Feed.
  virtual std::optional<Failure> Open() = 0;

  // Forwards a message that follows the header, or returns the failure if it is invalid. One call
  // at a time, not concurrently with Open.
  virtual std::optional<Failure> Feed(const grpc::ByteBuffer& message) = 0;
  // Returns true if another message may be read, even if only to reject it.
  virtual bool HasRoom() const = 0;
  // Returns true once all inputs have arrived.
  virtual bool complete() const = 0;
  // Returns the failure that names the missing input. REQUIRES: !complete(), and no Feed or Open is
  // running.
  virtual Failure Incomplete() const = 0;

  // The members have computed: sends their outputs to the client. Called once.
  virtual void Drain() = 0;
  // This many bytes passed to OnOutput have left this process.
  virtual void Delivered(int64_t payload_bytes) = 0;

  // Called periodically during the transfer.
  virtual TransferStalls Look() = 0;
  virtual TransferTotals totals() const = 0;
  // Progress reported by the members, for tensors that bypass this process.
  virtual void Advanced(const TransferAdvanced& advanced) {}
  // The request has succeeded and all outputs were delivered.
  virtual void Succeeded() {}

  // Ends all traffic. Later calls of the listener have no effect. Idempotent.
  virtual void Stop() = 0;
};

using MakeDataPlane =
    std::function<std::shared_ptr<DataPlane>(TransferSpec, std::shared_ptr<TransferListener>)>;

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_DATA_PLANE_H_

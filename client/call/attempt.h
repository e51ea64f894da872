// Attempt: one try of a call. It is one stream, from the header to the status.
// Tests: client_test.cc, concurrent_chunks_test.cc.
#ifndef RINGATTN_CLIENT_CALL_ATTEMPT_H_
#define RINGATTN_CLIENT_CALL_ATTEMPT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/channel.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"
#include "client/api/call.h"
#include "client/call/host_history.h"
#include "client/call/host_tensor_locations.h"
#include "client/stream/call_sharer.h"
#include "client/stream/stream_messages.h"
#include "client/transfer/transfer.h"
#include "client/transfer/worker_channels.h"
#include "common/layout/writer_rows.h"
#include "common/security/bearer_token.h"

namespace ringattn::client {

// What stays the same from replay to replay. The tensors' memory is the caller's and must stay
// valid until the call has ended.
struct CallPlan {
  CallKind kind = CallKind::kForward;
  grpc::ByteBuffer header;  // the stream's first message, with the request_id
  std::string traceparent;  // metadata; empty if there is none
  std::vector<InputTensor> inputs;
  std::vector<OutputTensor> outputs;
  uint64_t max_chunk_bytes_up = 0;  // 0: the server's recommendation
  bool with_crc32c = true;
  bool sends_only_header = false;  // no chunk follows; the client takes a SingleReply
  std::function<void(const v1::Progress&)> on_progress;  // may be empty
  std::function<void(const v1::Accepted&)> on_accepted;  // may be empty
  // Where the tensors lie in regions. Null, with the reason in no_host_reason, if some lie in none
  // or the caller chose another transport.
  std::shared_ptr<const HostTensorLocations> host = nullptr;
  std::string no_host_reason = {};
  bool host_required = false;
  // The caller accepts no other transport. If a worker lacks a region, the library attaches the
  // region to it and replays the call.
  bool only_host = false;
  // The call may use only CUDA memory, because the host cannot read the tensors. `host` is null if
  // the required CUDA memory is not available.
  bool on_cuda = false;
  // Whether to offer direct streams, and the reason if not.
  bool direct = false;
  std::string no_direct_reason = {};
  bool direct_required = false;
  // Set if the tensors are a writer's: as the header states it, and as values.
  std::optional<v1::Writer> writer = {};
  std::optional<WriterChoice> rows = {};
  // The outputs for direct streams. Workers send the components of packed results separately, so
  // each is a tensor of its own here, in its place in the packed one.
  std::vector<OutputTensor> direct_outputs = {};
};

struct AttemptResult {
  absl::Status status;
  // A server answered, if only with an error, so the address is right.
  bool server_answered = false;
  CallReport report;            // complete if status is OK
  bool region_unknown = false;  // the coordinator does not know the regions
  // The attempt offered host memory alone (AttemptTerms), which cannot be used. Another attempt
  // should offer the other transports too.
  bool host_alone_failed = false;
  // Why the next attempt should not offer direct streams; empty if it may.
  std::string no_direct = {};
  // Set if an only_host plan was rejected, possibly because a worker lacks a region: the values of
  // HostTensorLocations::Attachments before the attempt. Otherwise empty.
  std::vector<uint64_t> lacked_at = {};
};

// What may change from replay to replay.
struct AttemptTerms {
  bool offers_host = true;  // false: the attempt does not offer host memory
  // The attempt offers host memory alone if it can then share a stream.
  bool host_alone = false;
  std::string no_direct =
      {};  // the reason for not offering direct streams; empty if they may be offered
};

// A stream that runs on gRPC's threads once it has started. Thread safe.
class Attempt {
 public:
  virtual ~Attempt() = default;

  // Call once. The attempt keeps itself alive until its end.
  virtual void Start() = 0;

  // Ends the attempt soon, with CANCELLED. May be called before Start. Idempotent.
  virtual void Cancel() = 0;
};

// The ways to the service.
struct AttemptChannels {
  std::shared_ptr<grpc::Channel> coordinator = nullptr;
  CallSharer* sharer = nullptr;                       // outlives the attempt. Null: none
  HostHistory* host_history = nullptr;                // as `sharer`
  std::shared_ptr<WorkerChannels> workers = nullptr;  // null: no direct streams
  std::shared_ptr<BearerToken> token = nullptr;       // sent with the attempt; null: none
};

// Returns an attempt that has not started.
// Calls `done` once, on a thread of gRPC, when the status is known and neither gRPC nor a worker
// uses the caller's memory any more. If the server has stopped reading, gRPC releases the memory
// only when it gives up the connection, after about the keepalive timeout.
std::shared_ptr<Attempt> MakeAttempt(const AttemptChannels& channels,
                                     std::shared_ptr<const CallPlan> plan,
                                     std::chrono::system_clock::time_point deadline,
                                     const AttemptTerms& terms,
                                     std::function<void(AttemptResult)> done);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_ATTEMPT_H_

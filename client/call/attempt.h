// One attempt at a call: one stream, from the header to the status.
#ifndef RINGATTN_CLIENT_CALL_ATTEMPT_H_
#define RINGATTN_CLIENT_CALL_ATTEMPT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/channel.h>
#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"
#include "client/api/call.h"
#include "client/call/host_tensor_locations.h"
#include "client/transfer/transfer.h"
#include "client/transfer/worker_channels.h"
#include "common/security/bearer_token.h"

namespace ringattn::client {

enum class CallKind { kForward, kBackward };

// Everything that stays the same from replay to replay. Tensors' memory is the
// caller's and stays valid until the call has ended.
struct CallPlan {
  CallKind kind = CallKind::kForward;
  grpc::ByteBuffer header;  // the stream's first message, request_id included
  std::string traceparent;  // metadata; empty: none
  std::vector<InputTensor> inputs;
  std::vector<OutputTensor> outputs;
  uint64_t max_chunk_bytes_up = 0;  // 0: as the server recommends
  bool with_crc32c = true;
  std::function<void(const v1::Progress&)> on_progress;  // may be empty
  // Where the tensors lie; null: not all of them in regions, or the caller would not have it, for
  // this reason.
  std::shared_ptr<const HostTensorLocations> host = nullptr;
  std::string no_host_reason = {};
  bool host_required = false;
  // The caller would have no other way either: a worker that lacks a region is shown it, and the
  // call replayed.
  bool only_host = false;
  // `host` is of CUDA memory, or was to be: nothing here reads the tensors, and no other way is
  // offered.
  bool on_cuda = false;
  // Whether the tensors may go straight to the workers; else why not.
  bool direct = false;
  std::string no_direct_reason = {};
  bool direct_required = false;
  // For that way: of packed results the parts, where they lie, since workers send those.
  std::vector<OutputTensor> direct_outputs = {};
};

struct AttemptResult {
  absl::Status status;
  // Something came from a server, be it an error: the address is right.
  bool server_answered = false;
  CallReport report;            // complete if status is OK
  bool region_unknown = false;  // the coordinator does not know the regions (any more)
  // Why the tensors should not go straight to the workers again; empty: they may.
  std::string no_direct = {};
  // Of a plan that is only_host, refused because a worker lacks a region, perhaps: what its
  // HostTensorLocations::Attachments were before; else empty.
  std::vector<uint64_t> lacked_at = {};
};

// Everything that may change from replay to replay.
struct AttemptTerms {
  bool offers_host = true;     // false: whatever the plan says, likewise
  std::string no_direct = {};  // not empty: not straight to the workers, for this reason
};

// A stream that, once started, runs by itself on gRPC's threads. Thread safe.
class Attempt {
 public:
  virtual ~Attempt() = default;

  // Once. The attempt keeps itself alive until its end.
  virtual void Start() = 0;

  // Ends the attempt soon, with CANCELLED, also before Start. Idempotent.
  virtual void Cancel() = 0;
};

// An attempt on `channel`, not yet started; `token`, which may be null, is shown with it. `done` is
// called once, on one of gRPC's threads, when the status is known and gRPC holds none of the
// caller's memory any more. The latter may trail the former if the server has stopped reading:
// until the connection is given up, about the keepalive timeout. Nor does a worker write any of
// it. `workers` may be null: no streams straight to them.
std::shared_ptr<Attempt> MakeAttempt(std::shared_ptr<grpc::Channel> channel,
                                     std::shared_ptr<WorkerChannels> workers,
                                     std::shared_ptr<const CallPlan> plan,
                                     const std::shared_ptr<BearerToken>& token,
                                     std::chrono::system_clock::time_point deadline,
                                     const AttemptTerms& terms,
                                     std::function<void(AttemptResult)> done);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_ATTEMPT_H_

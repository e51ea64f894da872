// Events into the coordinator's core and actions out of it. The core owns no socket, timer, thread
// or clock, so a simulator can drive it with any order of losses, delays and retries. server/edge
// turns RPCs into events and carries out actions.
//
// Messages from and to workers are the protobuf messages of WorkerControlService.
#ifndef RINGATTN_SERVER_CORE_EVENTS_EVENTS_H_
#define RINGATTN_SERVER_CORE_EVENTS_EVENTS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/attention/attention_spec.h"
#include "common/plan/planner.h"
#include "common/request/transport_choice.h"
#include "common/schedule/schedule.h"
#include "ringattn/v1/cluster.pb.h"
#include "ringattn/v1/local_memory.pb.h"
#include "ringattn/v1/worker_control.pb.h"
#include "server/core/events/client_terms.h"
#include "server/core/events/failure.h"
#include "server/core/events/kv_events.h"

namespace ringattn::server {

// ---------------------------------------------------------------- events

struct WorkerJoined {  // the stream's first message
  ConnectionId connection = 0;
  v1::Register registration;
};
struct WorkerMessage {  // every later message
  ConnectionId connection = 0;
  v1::JoinRequest message;
  // Arrival time; the message may have waited in a queue. A time after its handling counts as the
  // time of handling.
  absl::Time received = absl::InfiniteFuture();
};
struct WorkerDisconnected {  // the stream ended, for any reason
  ConnectionId connection = 0;
};

// A tensor that came in a request's header.
struct InlineData {
  TensorId tensor = TensorId::kQ;
  std::string bytes;
};
using InlineTensors = std::vector<InlineData>;

// A validated request. Its stream stays open until FinishRequest or FailRequest.
struct RequestArrived {
  StreamId stream = 0;
  // The authenticated caller; empty: anonymous. Request ids are unique per principal.
  std::string principal;
  // The client that the request's share is charged to: the principal, or else its connection.
  std::string client;
  ClientTerms terms;       // of the client
  std::string request_id;  // never empty: the edge generates a missing one
  // of the header without request_id; distinguishes a retry from a reused id
  uint64_t fingerprint = 0;
  // The same without inline tensors. It only finds candidates for the plan of an equal request.
  uint64_t recipe_fingerprint = 0;
  AttentionSpec spec;
  Direction direction = Direction::kForward;
  bool recompute_forward = false;
  PlanChoice choice;
  absl::Time deadline = absl::InfiniteFuture();
  bool with_timeline = false;
  std::string traceparent;  // W3C trace context of the request; empty: none
  // Set for a Forward whose inputs and results are kept for a Backward, under this handle.
  struct Retain {
    std::string handle;  // unguessable
    absl::Duration ttl;
  };
  std::optional<Retain> retain;
  // The members only prepare the request and keep it for this long. It moves no tensors.
  std::optional<absl::Duration> prepare_ttl;
  // For a Backward, the handle of the residual that it reads; empty: the client sends all tensors.
  // `choice` then repeats the Forward's plan.
  std::string residual;
  bool keep_residual = false;
  TransportChoice transport;
  // 32 random bytes from which the tokens of the request's operations are derived. Set only if
  // clients may stream tensors to workers.
  std::string token_seed;
  // All inputs, if the header carried all of them; else null.
  std::shared_ptr<const InlineTensors> inline_inputs;
};
// The client cancelled, its deadline passed, its connection broke or its upload was invalid; `why`
// holds the cause. Answered by FailRequest with `why`, unless the stream has ended. Later events of
// the stream are ignored.
struct RequestEnded {
  StreamId stream = 0;
  Failure why;
};
// The client sent bytes, or the upload does not wait for the client. Resets the idle limit.
struct UploadProgressed {
  StreamId stream = 0;
};
// The client took bytes, or the download does not wait for the client. Resets the idle limit.
struct DownloadProgressed {
  StreamId stream = 0;
};
// Periodic report of the members that have not moved since the previous report although they should
// have. While uploading, such a member accepted no bytes, or has all its bytes and has not sent
// Uploaded. While downloading, it sent nothing although there was room. All other members moved or
// had nothing to do.
struct MembersStalled {
  StreamId stream = 0;
  std::vector<int> members;  // ranks in the request's ring
};
// The whole result was handed to the client's transport.
struct DownloadFinished {
  StreamId stream = 0;
};
// A shard stream to a member failed although the member's Join stream is open.
struct ShardStreamFailed {
  StreamId stream = 0;
  int member = 0;  // rank in the request's ring
  std::string reason;
};
struct CancelRequested {  // the Cancel RPC; the edge checked that the request exists
  std::string request_id;
  std::string principal;  // the request's
};
// Answers PlanThis. Ignored if the request has ended or the ring has changed.
struct Planned {
  StreamId stream = 0;
  uint64_t generation = 0;
  // Without spans (plan_summary.h). Or PlanRequest's error, DEADLINE_EXCEEDED if planning took too
  // long, or RESOURCE_EXHAUSTED if too many requests wait for plans.
  absl::StatusOr<std::shared_ptr<const Plan>> plan;
  double seconds = 0;  // of one core, spent on planning; 0 for a cached plan
};
struct ResidualDeleted {  // the DeleteResidual RPC
  std::string handle;
  std::string principal;
};
struct ResidualsRenewed {  // the RenewResiduals RPC
  std::vector<std::string> handles;
  std::string principal;
  absl::Duration ttl;
};
// The Attach RPC. Answered by AttachCompleted.
struct AttachRequested {
  uint64_t call = 0;  // identifies the RPC
  std::string principal;
  std::string client;
  int64_t bytes = 0;
  v1::RegionKind kind = v1::REGION_KIND_HOST;
  std::string region_id;  // 128 random bits for a new region
  bool is_new = false;
  std::vector<std::string> tokens;  // 128 random bits each, one per worker
};
struct DrainRequested {
  bool undo = false;
};
struct ReformRequested {};
// Time has passed. Sent at least every CoordinatorConfig::tick_interval.
struct Tick {};

using Event =
    std::variant<WorkerJoined, WorkerMessage, WorkerDisconnected, RequestArrived, RequestEnded,
                 UploadProgressed, DownloadProgressed, MembersStalled, DownloadFinished,
                 ShardStreamFailed, CancelRequested, Planned, ResidualDeleted, ResidualsRenewed,
                 AttachRequested, KvCacheRequested, KvWriterRequested, KvCachesRenewed,
                 KvCacheDeleted, KvCacheFailed, DrainRequested, ReformRequested, Tick>;

// ---------------------------------------------------------------- actions

struct SendToWorker {
  ConnectionId connection = 0;
  v1::JoinResponse message;
};
// Closes the Join stream. The core treats the worker as gone already.
struct DropWorker {
  ConnectionId connection = 0;
  std::string reason;
};

// Requests a plan, made outside the core; answered by Planned. Replaces an earlier one of the
// stream.
struct PlanThis {
  StreamId stream = 0;
  uint64_t generation = 0;
  std::string client;
  uint64_t fingerprint = 0;  // of the request's recipe
  std::shared_ptr<const AttentionSpec> spec;
  Direction direction = Direction::kForward;
  PlanChoice choice;
  PlannerInputs inputs;
  double cost_seconds = 0;  // rough prediction of the planning time
};
// Cancels PlanThis. Planned may still arrive if the plan was already made.
struct CancelPlan {
  StreamId stream = 0;
};

struct RingMember {
  ConnectionId connection = 0;
  std::string name;
  std::string data_address;
  // For direct streams: the member's address for clients, and the token that the client presents.
  std::string client_data_address = {};
  std::string token = {};
};
// Memory is reserved on every member. The edge informs the client and opens the shard streams.
struct AcceptRequest {
  StreamId stream = 0;
  std::string request_id;
  std::string operation_id;
  uint64_t generation = 0;
  std::shared_ptr<const Plan> plan;  // not null; without spans (plan_summary.h)
  std::vector<RingMember> members;   // by ring rank
  v1::Transport transport = v1::TRANSPORT_RELAY;
  std::string transport_reason;
  // The tensors have travelled in Reserve and Finished, or the member has copied them from and to
  // the client's memory. The operation has run already: BeginDownload and FinishRequest follow at
  // once. Also set for a request that is only prepared, which has no tensors.
  bool is_inline = false;
};
// Every member has computed. Outputs flow on the shard streams.
struct BeginDownload {
  StreamId stream = 0;
  std::vector<v1::RankReport> reports;  // by ring rank
  absl::Duration queue_time, upload_time, compute_time;
  // Outputs of an inline operation, in streaming order.
  google::protobuf::RepeatedPtrField<v1::TensorChunk> outputs;
};
// Ends the stream with OK after the summary. Follows DownloadFinished or, where members write the
// outputs themselves, Delivered from all of them.
struct FinishRequest {
  StreamId stream = 0;
  absl::Duration download_time;
  // For a Forward that requested a residual: its handle, or the reason that there is none.
  std::string residual_handle;
  std::string residual_reason;
  // For a request with prepare_ttl.
  struct Prepared {
    absl::Duration ttl;
    int64_t bytes = 0;  // summed over the members
    int found = 0;      // members that had the part already
  };
  std::optional<Prepared> prepared;
};
// Ends the stream with this status and closes its shard streams. No action for the stream follows.
struct FailRequest {
  StreamId stream = 0;
  Failure failure;
};
struct StateChanged {  // read by GetStatus, Progress and metrics
  StreamId stream = 0;
  v1::RequestState state = v1::REQUEST_STATE_UNSPECIFIED;
};
struct TopologyChanged {     // Coordinator::topology() has changed
  bool only_memory = false;  // only reserved_bytes changed, as with every request
};
// The reason that a worker was lost.
enum class LossReason : uint8_t {
  kDisconnected,     // its control stream ended: process, machine or network failure
  kSilent,           // no heartbeat
  kNoAnswer,         // to a command, within control_timeout
  kStuck,            // its run made no progress
  kTransferStalled,  // it accepted no input bytes or sent no output bytes
  kReplaced,         // another process joined under its name
};
inline constexpr LossReason kLossReasons[] = {
    LossReason::kDisconnected, LossReason::kSilent,          LossReason::kNoAnswer,
    LossReason::kStuck,        LossReason::kTransferStalled, LossReason::kReplaced,
};
// Emitted once per loss, for metrics. Requires no reaction.
struct LostWorker {
  absl::Time when;
  std::string worker;
  std::string device;
  std::optional<int> rank;  // in the ring that the loss ended; nullopt: in no ready ring
  uint64_t generation = 0;
  LossReason reason = LossReason::kDisconnected;
  std::string detail;          // the reason with its figures
  int64_t ended_requests = 0;  // accepted requests that end with ABORTED
};
// For logs: one worker, or all workers of a host that were lost within one heartbeat. Every
// LostWorker is in one of them. Requires no reaction.
struct LossEvent {
  absl::Time when;
  std::string host;  // empty: one worker
  std::vector<LostWorker> workers;
};
// A generation has ended after the loss of a member, and operations without that member had run on.
// For logs. Requires no reaction.
struct LossOutlived {
  uint64_t generation = 0;
  absl::Duration duration;  // from the loss to the end of the generation
  int64_t completed = 0;    // requests that succeeded meanwhile
  int64_t ended = 0;        // requests that ended with the generation
};
// Two hosts cannot reach each other any more, or they can again. For logs. Requires no reaction.
struct ReachChanged {
  absl::Time when;
  std::string a, b;  // hosts; a worker whose host is unknown stands for itself
  bool reached = false;
  std::string detail;
};
struct ServingChanged {  // the state for grpc.health.v1
  bool serving = false;
};
struct AttachCompleted {
  uint64_t call = 0;
  std::optional<Failure> failure;
  v1::AttachResponse response;  // valid unless `failure` is set
};
// Progress of a request's tensors that bypass the coordinator, summed over its members.
struct TransferAdvanced {
  StreamId stream = 0;
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  bool waits_for_client = false;  // at least one member waits
};
struct DrainCompleted {};
struct RingReformed {  // answers ReformRequested
  absl::Status status;
  uint64_t generation = 0;
};

using Action =
    std::variant<SendToWorker, DropWorker, PlanThis, CancelPlan, AcceptRequest, BeginDownload,
                 FinishRequest, FailRequest, StateChanged, TopologyChanged, LostWorker, LossEvent,
                 LossOutlived, ReachChanged, ServingChanged, AttachCompleted, KvCacheAnswered,
                 KvWriterAnswered, KvWriterEnded, TransferAdvanced, DrainCompleted, RingReformed>;

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_EVENTS_H_

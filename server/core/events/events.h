// The coordinator's core speaks in these values: events in, actions out. It owns
// no socket, timer, thread or clock, so that a simulator can drive it with any
// order of losses, delays and repeats. server/edge turns RPCs into events and
// carries actions out.
//
// Worker messages are the protobuf messages of WorkerControlService themselves.
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

namespace ringattn::server {

// One open Join stream. Never reused.
using ConnectionId = uint64_t;
// One open Forward or Backward stream of a client. Never reused.
using StreamId = uint64_t;

// A failure as the client sees it: the edge adds the google.rpc details.
struct Failure {
  absl::StatusCode code = absl::StatusCode::kUnknown;
  std::string message;
  std::string reason;  // ErrorInfo.reason, UPPER_SNAKE_CASE, e.g. "WORKER_LOST"
  std::optional<absl::Duration> retry_after;  // RetryInfo
  std::string field;                          // BadRequest.field_violations.field; usually empty
  struct Quota {
    std::string subject;      // "client:NAME"
    std::string description;  // which one, and what it is
  };
  std::optional<Quota> quota;  // QuotaFailure, of one client's own
};

// ---------------------------------------------------------------- events

struct WorkerJoined {  // the stream's first message
  ConnectionId connection = 0;
  v1::Register registration;
};
struct WorkerMessage {  // every later message
  ConnectionId connection = 0;
  v1::JoinRequest message;
  // When it came: it may have waited for its handling. Later than that handling: taken for it.
  absl::Time received = absl::InfiniteFuture();
};
struct WorkerGone {  // the stream ended, for whatever reason
  ConnectionId connection = 0;
};

// A validated request. Its stream stays open until FinishRequest or FailRequest.
struct RequestArrived {
  StreamId stream = 0;
  // Who asks, as authenticated; empty: anybody. Request ids are the principal's own.
  std::string principal;
  // Whose share of the service it takes: the principal, or else the connection it came on.
  std::string client;
  ClientTerms terms;         // the client's
  std::string request_id;    // never empty: the edge makes one up
  uint64_t fingerprint = 0;  // of the header without request_id: tells a replay from a mix-up
  AttentionSpec spec;
  Direction direction = Direction::kForward;
  bool recompute_forward = false;
  PlanChoice choice;
  absl::Time deadline = absl::InfiniteFuture();
  bool with_timeline = false;
  std::string traceparent;  // W3C trace context that it belongs to; empty: none
  // A Forward whose inputs and results are to stay for a Backward, under this handle.
  struct Retain {
    std::string handle;  // that nobody can guess
    absl::Duration ttl;
  };
  std::optional<Retain> retain;
  // A Backward: the handle of what it reads; empty: the client sends all. `choice` is then the
  // Forward's plan.
  std::string residual;
  bool keep_residual = false;
  TransportChoice transport;
  // 32 random bytes, the request's own: what the tokens of its operations are made of. Only if
  // its tensors may go straight to workers.
  std::string token_seed;
};
// The client cancelled, its deadline passed, its connection broke or its upload
// was wrong: `why` says which. Answered by FailRequest with `why`, unless the stream
// has ended already. Later events of the stream are ignored.
struct RequestEnded {
  StreamId stream = 0;
  Failure why;
};
// Bytes arrived from the client, or it is not the client that is waited for (for the idle limit).
struct UploadProgressed {
  StreamId stream = 0;
};
// The client took bytes, or it is not the client that is waited for (for the idle limit).
struct DownloadProgressed {
  StreamId stream = 0;
};
// How the request's members do, as the edge sees it from time to time. Those named have been
// waited for in vain since it looked before: while uploading they took none of the bytes that
// wait for them, or have them all and have not said Uploaded; while downloading they sent
// nothing though there was room for it. Whoever is not named has moved or was not waited for.
struct MembersStalled {
  StreamId stream = 0;
  std::vector<int> members;  // ranks in the request's ring
};
// The whole result has been handed to the client's transport.
struct DownloadFinished {
  StreamId stream = 0;
};
// A shard stream to a member failed although the member's Join stream lives.
struct ShardStreamFailed {
  StreamId stream = 0;
  int member = 0;  // rank in the request's ring
  std::string reason;
};
struct CancelRequested {  // the Cancel RPC; the edge checked that it exists
  std::string request_id;
  std::string principal;  // whose request it is
};
// Answers PlanThis. Ignored if the request has ended or the ring is another one by now.
struct Planned {
  StreamId stream = 0;
  uint64_t generation = 0;
  // Without its spans (plan_summary.h). What PlanRequest answers, and of the planning itself
  // DEADLINE_EXCEEDED (it took too long) and RESOURCE_EXHAUSTED (too many wait for theirs).
  absl::StatusOr<std::shared_ptr<const Plan>> plan;
  double seconds = 0;  // of one core, that it took; none if it was known
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
// The Attach RPC. Answered by AttachAnswered.
struct AttachRequested {
  uint64_t call = 0;  // names the RPC
  std::string principal;
  std::string client;
  int64_t bytes = 0;
  v1::RegionKind kind = v1::REGION_KIND_HOST;
  std::string region_id;  // 128 random bits if it is new
  bool is_new = false;
  std::vector<std::string> tokens;  // 128 random bits each, to be dealt out
};
struct DrainRequested {
  bool undo = false;
};
struct ReformRequested {};
// Time has passed. Sent at least every CoordinatorConfig::tick_interval.
struct Tick {};

using Event =
    std::variant<WorkerJoined, WorkerMessage, WorkerGone, RequestArrived, RequestEnded,
                 UploadProgressed, DownloadProgressed, MembersStalled, DownloadFinished,
                 ShardStreamFailed, CancelRequested, Planned, ResidualDeleted, ResidualsRenewed,
                 AttachRequested, DrainRequested, ReformRequested, Tick>;

// ---------------------------------------------------------------- actions

struct SendToWorker {
  ConnectionId connection = 0;
  v1::JoinResponse message;
};
// Close the Join stream. The worker is treated as gone already.
struct DropWorker {
  ConnectionId connection = 0;
  std::string reason;
};

// Make a plan, elsewhere; answered by Planned. Takes the place of an earlier one of the stream.
struct PlanThis {
  StreamId stream = 0;
  uint64_t generation = 0;
  std::string client;
  uint64_t fingerprint = 0;  // the request's
  std::shared_ptr<const AttentionSpec> spec;
  Direction direction = Direction::kForward;
  PlanChoice choice;
  PlannerInputs inputs;
  double cost_seconds = 0;  // that making it will take, roughly
};
// Its plan is not wanted any more; one that is made already may still come.
struct CancelPlan {
  StreamId stream = 0;
};

struct RingMember {
  ConnectionId connection = 0;
  std::string name;
  std::string data_address;
  // Of DIRECT_STREAM: where the client reaches it, and what it shows there.
  std::string client_data_address = {};
  std::string token = {};
};
// Memory is reserved on every member: tell the client and open the shard streams.
struct AcceptRequest {
  StreamId stream = 0;
  std::string request_id;
  std::string operation_id;
  uint64_t generation = 0;
  std::shared_ptr<const Plan> plan;  // not null; without its spans (plan_summary.h)
  std::vector<RingMember> members;   // by ring rank
  v1::Transport transport = v1::TRANSPORT_RELAY;
  std::string transport_reason;
};
// Every member has computed; outputs flow on the shard streams.
struct BeginDownload {
  StreamId stream = 0;
  std::vector<v1::RankReport> reports;  // by ring rank
  absl::Duration queue_time, upload_time, compute_time;
};
// End the stream with OK after the summary. Follows DownloadFinished, or where the members
// write the outputs themselves their Delivered.
struct FinishRequest {
  StreamId stream = 0;
  absl::Duration download_time;
  // Of a Forward that asked for it: the handle, or why nothing is kept.
  std::string residual_handle;
  std::string residual_reason;
};
// End the stream with this status and close its shard streams. Nothing follows.
struct FailRequest {
  StreamId stream = 0;
  Failure failure;
};
struct StateChanged {  // GetStatus, Progress and metrics read it
  StreamId stream = 0;
  v1::RequestState state = v1::REQUEST_STATE_UNSPECIFIED;
};
struct TopologyChanged {     // Coordinator::topology() has news
  bool only_memory = false;  // of reserved_bytes alone: as often as requests come and go
};
// Why a worker was lost.
enum class LossReason : uint8_t {
  kDisconnected,     // its control stream ended: the process, its machine or the network
  kSilent,           // no heartbeat
  kNoAnswer,         // to a command
  kStuck,            // its run made no progress
  kTransferStalled,  // it took no input bytes or sent no output bytes
  kReplaced,         // another process joined under its name
};
inline constexpr LossReason kLossReasons[] = {
    LossReason::kDisconnected, LossReason::kSilent,          LossReason::kNoAnswer,
    LossReason::kStuck,        LossReason::kTransferStalled, LossReason::kReplaced,
};
// Told once for each loss, for logs and metrics; nothing is to be done about it.
struct LostWorker {
  absl::Time when;
  std::string worker;
  std::string device;
  std::optional<int> rank;  // in the ring that it ended; none: it was in no ready ring
  uint64_t generation = 0;
  LossReason reason = LossReason::kDisconnected;
  std::string words;           // the same with its figures
  int64_t ended_requests = 0;  // that it had accepted, and that end with ABORTED
};
struct ServingChanged {  // what grpc.health.v1 should say
  bool serving = false;
};
struct AttachAnswered {
  uint64_t call = 0;
  std::optional<Failure> failure;
  v1::AttachResponse response;  // unless it failed
};
// How far a request's tensors are that do not pass the coordinator, all members together.
struct TransferAdvanced {
  StreamId stream = 0;
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  bool waits_for_client = false;  // one of them does
};
struct DrainCompleted {};
struct RingReformed {  // answers ReformRequested
  absl::Status status;
  uint64_t generation = 0;
};

using Action =
    std::variant<SendToWorker, DropWorker, PlanThis, CancelPlan, AcceptRequest, BeginDownload,
                 FinishRequest, FailRequest, StateChanged, TopologyChanged, LostWorker,
                 ServingChanged, AttachAnswered, TransferAdvanced, DrainCompleted, RingReformed>;

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_EVENTS_H_

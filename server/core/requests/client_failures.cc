#include "server/core/requests/client_failures.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ringattn::server {
namespace {

Failure Make(absl::StatusCode code, const char* reason, std::string message) {
  Failure failure;
  failure.code = code;
  failure.reason = reason;
  failure.message = std::move(message);
  return failure;
}

Failure MakeRetryable(absl::StatusCode code, const char* reason, std::string message,
                      absl::Duration retry_after) {
  Failure failure = Make(code, reason, std::move(message));
  failure.retry_after = retry_after;
  return failure;
}

}  // namespace

Failure Draining(absl::Duration retry_after) {
  return MakeRetryable(absl::StatusCode::kUnavailable, "DRAINING",
                       "the server is draining and takes no new requests", retry_after);
}

Failure NoRing(absl::Duration retry_after) {
  return MakeRetryable(absl::StatusCode::kUnavailable, "NO_RING", "no ring of workers is formed",
                       retry_after);
}

Failure QueueFull(int64_t requests, int64_t bytes, int64_t max_requests, int64_t max_bytes,
                  absl::Duration retry_after) {
  return MakeRetryable(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                       absl::StrCat("the queue is full: ", requests, " of ", max_requests,
                                    " requests, ", bytes, " of ", max_bytes, " bytes wait"),
                       retry_after);
}

Failure ClientQueueFull(const std::string& client, int64_t requests, int64_t bytes,
                        int64_t max_requests, int64_t max_bytes, absl::Duration retry_after) {
  const std::string quota = absl::StrCat(requests, " of ", max_requests, " requests, ", bytes,
                                         " of ", max_bytes, " bytes wait");
  Failure failure =
      MakeRetryable(absl::StatusCode::kResourceExhausted, "CLIENT_QUEUE_FULL",
                    absl::StrCat("this client's share of the queue is full: ", quota), retry_after);
  failure.quota = {absl::StrCat("client:", client),
                   absl::StrCat(requests >= max_requests ? "max_queued_requests_per_client: "
                                                         : "max_queued_bytes: ",
                                quota)};
  return failure;
}

Failure ClientInFlightFull(const std::string& client, int64_t max_requests,
                           absl::Duration retry_after) {
  Failure failure =
      MakeRetryable(absl::StatusCode::kResourceExhausted, "CLIENT_REQUESTS_IN_FLIGHT",
                    absl::StrCat("this client has ", max_requests,
                                 " requests in flight, as many as it may have at a time"),
                    retry_after);
  failure.quota = {absl::StrCat("client:", client),
                   absl::StrCat("max_requests_in_flight: ", max_requests)};
  return failure;
}

Failure RequestIdReused(const std::string& request_id) {
  Failure failure =
      Make(absl::StatusCode::kInvalidArgument, "REQUEST_ID_REUSED",
           absl::StrCat("request_id ", request_id, " is in flight with a different header"));
  failure.field = "request_id";
  return failure;
}

Failure Superseded(const std::string& request_id) {
  return Make(absl::StatusCode::kAborted, "SUPERSEDED",
              absl::StrCat("a newer stream took over request_id ", request_id));
}

Failure CancelledByCall() {
  return Make(absl::StatusCode::kCancelled, "CANCELLED", "cancelled by Cancel");
}

Failure DeadlineExceeded(const char* state) {
  return Make(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
              absl::StrCat("the deadline passed while the request was ", state));
}

Failure UploadIdle(absl::Duration limit) {
  return Make(absl::StatusCode::kDeadlineExceeded, "UPLOAD_IDLE",
              absl::StrCat("no tensor bytes arrived for ", absl::FormatDuration(limit)));
}

Failure DownloadIdle(absl::Duration limit) {
  return Make(
      absl::StatusCode::kDeadlineExceeded, "DOWNLOAD_IDLE",
      absl::StrCat("the client took no bytes of the result for ", absl::FormatDuration(limit)));
}

Failure DeadlineTooShort(absl::Duration predicted, absl::Duration left) {
  return Make(absl::StatusCode::kDeadlineExceeded, "DEADLINE_TOO_SHORT",
              absl::StrCat("computing is predicted to take ", absl::FormatDuration(predicted),
                           ", far more than the ", absl::FormatDuration(left),
                           " that the deadline leaves"));
}

Failure RunTooLong(absl::Duration limit, absl::Duration predicted) {
  return Make(absl::StatusCode::kDeadlineExceeded, "RUN_TOO_LONG",
              absl::StrCat("computing took longer than ", absl::FormatDuration(limit), ", ",
                           absl::FormatDuration(predicted), " were predicted"));
}

// The planner's message starts with the name of the invalid field.
Failure NotPlannable(const absl::Status& status) {
  Failure failure = Make(status.code(), "NOT_PLANNABLE", std::string(status.message()));
  if (absl::StartsWith(status.message(), "plan.")) {
    failure.field = failure.message.substr(0, failure.message.find(':'));
  }
  return failure;
}

Failure OptionNotServed(const std::string& option, const std::string& device,
                        const std::string& worker) {
  const std::string field =
      absl::StrContains(option, '.') ? option : absl::StrCat("options.", option);
  Failure failure = Make(absl::StatusCode::kUnimplemented, "OPTION_NOT_SERVED",
                         absl::StrCat(field, ": the kernels of device ", device, " (worker ",
                                      worker, ") do not serve it"));
  failure.field = field;
  return failure;
}

Failure TuningNotOffered(const std::string& name, int64_t value, const std::string& offered,
                         const std::string& device, const std::string& worker) {
  const std::string field = absl::StrCat("plan.tuning.", name);
  Failure failure =
      Make(absl::StatusCode::kInvalidArgument, "TUNING_NOT_OFFERED",
           absl::StrCat(field, ": is ", value, "; the kernels of device ", device, " (worker ",
                        worker, ") take ", offered.empty() ? "none" : offered));
  failure.field = field;
  return failure;
}

Failure MemberNotReady(const std::string& name, const std::vector<std::string>& ready) {
  constexpr size_t kMaxListed = 16;
  const size_t listed = std::min(ready.size(), kMaxListed);
  std::string workers = absl::StrJoin(ready.begin(), ready.begin() + listed, ", ");
  if (listed < ready.size()) absl::StrAppend(&workers, " and ", ready.size() - listed, " more");
  Failure failure =
      Make(absl::StatusCode::kFailedPrecondition, "MEMBER_NOT_READY",
           absl::StrCat("plan.members: worker ", name, " is not ready; ready workers: ", workers));
  failure.field = "plan.members";
  return failure;
}

Failure PlanningTooLong(const absl::Status& status) {
  return Make(absl::StatusCode::kResourceExhausted, "PLANNING_TOO_LONG",
              absl::StrCat(status.message(), ": choose another layout, or fewer documents"));
}

Failure PlannerBusy(const absl::Status& status, absl::Duration retry_after) {
  return MakeRetryable(absl::StatusCode::kResourceExhausted, "PLANNER_BUSY",
                       std::string(status.message()), retry_after);
}

Failure WorkersMissing(const absl::Status& status, absl::Duration retry_after) {
  return MakeRetryable(absl::StatusCode::kUnavailable, "WORKERS_MISSING",
                       absl::StrCat(status.message(), "; more are expected"), retry_after);
}

Failure NeverFits(int rank, const std::string& worker, int64_t buffers, int64_t workspace,
                  int64_t available, int64_t kv_caches) {
  const std::string parts =
      workspace == 0
          ? ""
          : absl::StrCat(" (buffers of ", buffers, " and a kernel workspace of ", workspace, ")");
  return Make(absl::StatusCode::kResourceExhausted, "WORKER_MEMORY",
              absl::StrCat("rank ", rank, " (", worker, ") needs ", buffers + workspace, " bytes",
                           parts, "; it has ", available, " in total",
                           kv_caches == 0 ? "" : ", of which K/V caches hold ",
                           kv_caches == 0 ? "" : absl::StrCat(kv_caches)));
}

Failure ReserveRefused(int rank, const std::string& worker, int64_t needed,
                       const std::string& reason, absl::Duration retry_after) {
  return MakeRetryable(
      absl::StatusCode::kResourceExhausted, "WORKER_MEMORY",
      absl::StrCat("rank ", rank, " (", worker, ") could not reserve ", needed, " bytes: ", reason),
      retry_after);
}

Failure ReserveSlow(absl::Duration limit, absl::Duration retry_after) {
  return MakeRetryable(absl::StatusCode::kUnavailable, "RESERVE_SLOW",
                       absl::StrCat("a worker did not reserve memory for the request within ",
                                    absl::FormatDuration(absl::Trunc(limit, absl::Seconds(1)))),
                       retry_after);
}

Failure ReserveMalformed(int rank, const std::string& worker, const std::string& reason) {
  return Make(absl::StatusCode::kInternal, "RESERVE_MALFORMED",
              absl::StrCat("rank ", rank, " (", worker, ") could not read Reserve: ", reason));
}

Failure NotKept(int rank, const std::string& worker, const std::string& reason) {
  Failure failure = Make(absl::StatusCode::kFailedPrecondition, "NOT_KEPT",
                         absl::StrCat("rank ", rank, " (", worker, ") cannot keep it: ", reason));
  failure.field = "prepare";
  return failure;
}

Failure ComputeFailed(int rank, const std::string& worker, const std::string& reason) {
  return Make(absl::StatusCode::kInternal, "COMPUTE_FAILED",
              absl::StrCat("rank ", rank, " (", worker, ") failed: ", reason));
}

Failure ShardStreamBroken(int rank, const std::string& worker, const std::string& reason,
                          absl::Duration retry_after) {
  return MakeRetryable(
      absl::StatusCode::kAborted, "SHARD_STREAM_BROKEN",
      absl::StrCat("the data stream to rank ", rank, " (", worker, ") broke: ", reason),
      retry_after);
}

Failure WorkerLost(int rank, const std::string& worker, const std::string& reason,
                   absl::Duration retry_after) {
  return MakeRetryable(absl::StatusCode::kAborted, "WORKER_LOST",
                       absl::StrCat("rank ", rank, " (", worker, ") was lost: ", reason),
                       retry_after);
}

Failure ResidualNotFound() {
  Failure failure = Make(absl::StatusCode::kNotFound, "RESIDUAL_NOT_FOUND",
                         "this client has no such residual: send the tensors");
  failure.field = "residual_handle";
  return failure;
}

Failure ResidualEnded(ResidualEnd end) {
  const auto make = [](const char* reason, const char* detail) {
    return Make(absl::StatusCode::kFailedPrecondition, reason,
                absl::StrCat("the residual ", detail, ": send the tensors"));
  };
  switch (end) {
    case ResidualEnd::kConsumed:
      return make("RESIDUAL_CONSUMED", "was used by another Backward, which did not keep it");
    case ResidualEnd::kDeleted:
      return make("RESIDUAL_CONSUMED", "was deleted");
    case ResidualEnd::kExpired:
      return make("RESIDUAL_EXPIRED", "has expired");
    case ResidualEnd::kLost:
      return make("RESIDUAL_LOST", "was lost with a worker that held a shard of it");
    case ResidualEnd::kEvicted:
      return make("RESIDUAL_LOST", "was evicted for a request that needed its memory");
  }
  return make("RESIDUAL_LOST", "has ended");
}

Failure RingEnded(const std::string& reason, absl::Duration retry_after) {
  return MakeRetryable(absl::StatusCode::kAborted, "RING_ENDED",
                       absl::StrCat("the ring ended: ", reason), retry_after);
}

// Does not reveal whether the id belongs to another client.
Failure RegionUnknown(const std::string& field) {
  Failure failure =
      Make(absl::StatusCode::kInvalidArgument, "REGION_UNKNOWN",
           absl::StrCat(field, ": names no region of this client; attach it (again) first"));
  failure.field = field;
  return failure;
}

Failure LocationOutsideRegion(const std::string& field, const std::string& tensor, int64_t offset,
                              int64_t bytes, int64_t region_bytes) {
  Failure failure = Make(absl::StatusCode::kInvalidArgument, "INVALID_REQUEST",
                         absl::StrCat(field, ": ", tensor, " needs ", bytes, " bytes from offset ",
                                      offset, "; the region has ", region_bytes));
  failure.field = field;
  return failure;
}

Failure TransportUnavailable(const std::string& why) {
  Failure failure = Make(absl::StatusCode::kFailedPrecondition, "TRANSPORT_UNAVAILABLE",
                         absl::StrCat("transport.required: ", why));
  failure.field = "transport.required";
  return failure;
}

Failure BadShardChunk(int rank, const std::string& worker, const std::string& reason) {
  Failure failure = Make(absl::StatusCode::kInvalidArgument, "BAD_CHUNK",
                         absl::StrCat("rank ", rank, " (", worker,
                                      ") received invalid data from the client: ", reason));
  failure.field = "chunk";
  return failure;
}

Failure RegionReleased(int rank, const std::string& worker) {
  return Make(absl::StatusCode::kCancelled, "REGION_RELEASED",
              absl::StrCat("the client released a region that the request needs; rank ", rank, " (",
                           worker, ") reported it"));
}

Failure WriterReleasedRegion(int rank, const std::string& worker) {
  return Make(absl::StatusCode::kAborted, "WRITER_LOST",
              absl::StrCat("a writer released a region that the request needs, or its process "
                           "ended; rank ",
                           rank, " (", worker, ") reported it"));
}

Failure TransferFailed(int rank, const std::string& worker, const std::string& reason,
                       absl::Duration retry_after) {
  return MakeRetryable(
      absl::StatusCode::kAborted, "TRANSFER_FAILED",
      absl::StrCat("rank ", rank, " (", worker, ") could not copy the tensors: ", reason),
      retry_after);
}

Failure RegionNotFound() {
  Failure failure = Make(absl::StatusCode::kNotFound, "REGION_UNKNOWN",
                         "region_id: names no region of this client");
  failure.field = "region_id";
  return failure;
}

Failure RegionHasAnotherSize(int64_t bytes) {
  Failure failure =
      Make(absl::StatusCode::kInvalidArgument, "INVALID_REQUEST",
           absl::StrCat("bytes: the region has ", bytes, "; attach it with that size"));
  failure.field = "bytes";
  return failure;
}

Failure RegionSizeWrong(int64_t bytes, int64_t limit) {
  Failure failure =
      Make(absl::StatusCode::kInvalidArgument, "INVALID_REQUEST",
           absl::StrCat("bytes: is ", bytes, ", must be at least 1 and at most ", limit));
  failure.field = "bytes";
  return failure;
}

Failure TooManyRegions(int64_t own, int64_t limit, absl::Duration retry_after) {
  return MakeRetryable(
      absl::StatusCode::kResourceExhausted, "TOO_MANY_REGIONS",
      absl::StrCat("this client has ", own, " regions; the limit is ", limit,
                   " per client, or the server's limit for all clients is reached"),
      retry_after);
}

Failure RegionHasAnotherKind(bool is_cuda) {
  Failure failure =
      Make(absl::StatusCode::kInvalidArgument, "INVALID_REQUEST",
           absl::StrCat("kind: the region is of ", is_cuda ? "CUDA" : "host", " memory"));
  failure.field = "kind";
  return failure;
}

Failure NoLocalMemory(bool cuda) {
  return Make(absl::StatusCode::kFailedPrecondition, "TRANSPORT_UNAVAILABLE",
              absl::StrCat("no connected worker takes ", cuda ? "CUDA" : "host",
                           " memory (--local_memory)"));
}

}  // namespace ringattn::server

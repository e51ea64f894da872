// Every failure that the core gives to clients: its code, its reason (contract
// with client libraries) and its words.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_CLIENT_FAILURES_H_
#define RINGATTN_SERVER_CORE_REQUESTS_CLIENT_FAILURES_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/core/events/events.h"
#include "server/core/events/residual_view.h"

namespace ringattn::server {

Failure Draining(absl::Duration retry_after);
Failure NoRing(absl::Duration retry_after);
Failure QueueFull(int64_t requests, int64_t bytes, int64_t max_requests, int64_t max_bytes,
                  absl::Duration retry_after);
// Of the places that one client may have in the queue. Its name goes into QuotaFailure.
Failure ClientQueueFull(const std::string& client, int64_t requests, int64_t bytes,
                        int64_t max_requests, int64_t max_bytes, absl::Duration retry_after);
// Likewise of the requests that it may have in flight.
Failure ClientInFlightFull(const std::string& client, int64_t max_requests,
                           absl::Duration retry_after);
Failure RequestIdReused(const std::string& request_id);
Failure Superseded(const std::string& request_id);
Failure CancelledByCall();
Failure DeadlineExceeded(const char* state);
Failure UploadIdle(absl::Duration limit);
Failure DownloadIdle(absl::Duration limit);
// The deadline leaves `left`, and `predicted` is needed.
Failure DeadlineTooShort(absl::Duration predicted, absl::Duration left);
// Predictions are rough; this one was wrong by more than they ever are.
Failure RunTooLong(absl::Duration limit, absl::Duration predicted);
// The planner's refusal, code and words as they are.
Failure NotPlannable(const absl::Status& status);
// Too few members have kernels for an option, named as in AttentionOptions; one that lacks them.
Failure OptionNotServed(const std::string& option, const std::string& device,
                        const std::string& worker);
// `offered`: the values that it takes, as text.
Failure TuningNotOffered(const std::string& name, int64_t value, const std::string& offered,
                         const std::string& device, const std::string& worker);
Failure MemberNotReady(const std::string& name);
// Making the plan took too long.
Failure PlanningTooLong(const absl::Status& status);
// Too many wait for their plans.
Failure PlannerBusy(const absl::Status& status, absl::Duration retry_after);
// The ring is smaller than it was, or has only just begun to gather.
Failure WorkersMissing(const absl::Status& status, absl::Duration retry_after);
// `buffers` bytes, and `workspace` for the kernels if that is known, on the worker that only
// has `available` in all.
Failure NeverFits(int rank, const std::string& worker, int64_t buffers, int64_t workspace,
                  int64_t available);
// A worker that holds nothing else refused to reserve.
Failure ReserveRefused(int rank, const std::string& worker, int64_t needed,
                       const std::string& reason, absl::Duration retry_after);
// A fault of ours, or workers that are of another build: the same comes of every other try.
Failure ReserveMalformed(int rank, const std::string& worker, const std::string& reason);
Failure ComputeFailed(int rank, const std::string& worker, const std::string& reason);
Failure ShardStreamBroken(int rank, const std::string& worker, const std::string& reason,
                          absl::Duration retry_after);
// rank: in the generation.
Failure WorkerLost(int rank, const std::string& worker, const std::string& reason,
                   absl::Duration retry_after);
// A Backward names a residual that nobody knows, or another client's.
Failure ResidualNotFound();
// One that there was.
Failure ResidualGone(ResidualEnd end);
// The generation ended and no worker is to blame.
Failure RingEnded(const std::string& reason, absl::Duration retry_after);

// --- Tensors that do not pass the coordinator (common/request/transport_choice.h).
// What the client sent straight to a member was wrong.
Failure BadShardChunk(int rank, const std::string& worker, const std::string& reason);
// The request's region is none of this client's.
Failure RegionUnknown(const std::string& field);
Failure PlaceOutside(const std::string& field, const std::string& tensor, int64_t offset,
                     int64_t bytes, int64_t region_bytes);
Failure TransportUnavailable(const std::string& why);
// The client closed the region's socket, or died, while its request needed it.
Failure RegionReleased(int rank, const std::string& worker);
// A member could not copy the tensors.
Failure TransferFailed(int rank, const std::string& worker, const std::string& reason,
                       absl::Duration retry_after);
// Of Attach.
Failure RegionNotFound();
Failure RegionHasAnotherSize(int64_t bytes);
Failure RegionSizeWrong(int64_t bytes, int64_t limit);
Failure TooManyRegions(int64_t own, int64_t limit, absl::Duration retry_after);
Failure RegionHasAnotherKind(bool is_cuda);
Failure NoLocalMemory(bool cuda);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_CLIENT_FAILURES_H_

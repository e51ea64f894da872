// Every failure that the core reports to clients: its code, its reason (a contract with client
// libraries) and its message.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_CLIENT_FAILURES_H_
#define RINGATTN_SERVER_CORE_REQUESTS_CLIENT_FAILURES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/core/events/events.h"
#include "server/core/events/residual_view.h"

namespace ringattn::server {

Failure Draining(absl::Duration retry_after);
Failure NoRing(absl::Duration retry_after);
Failure QueueFull(int64_t requests, int64_t bytes, int64_t max_requests, int64_t max_bytes,
                  absl::Duration retry_after);
// The client has reached its own queue limit. `client` goes into QuotaFailure.
Failure ClientQueueFull(const std::string& client, int64_t requests, int64_t bytes,
                        int64_t max_requests, int64_t max_bytes, absl::Duration retry_after);
// The client has reached its limit of requests in flight.
Failure ClientInFlightFull(const std::string& client, int64_t max_requests,
                           absl::Duration retry_after);
Failure RequestIdReused(const std::string& request_id);
Failure Superseded(const std::string& request_id);
Failure CancelledByCall();
Failure DeadlineExceeded(const char* state);
Failure UploadIdle(absl::Duration limit);
Failure DownloadIdle(absl::Duration limit);
// The deadline leaves `left`, less than `predicted` by more than any error of prediction.
Failure DeadlineTooShort(absl::Duration predicted, absl::Duration left);
// The run exceeded its prediction by more than any error of prediction.
Failure RunTooLong(absl::Duration limit, absl::Duration predicted);
// The planner's error, with its code and message.
Failure NotPlannable(const absl::Status& status);
// Too few members have kernels for an option, named as in AttentionOptions; `worker` is one of
// those that lack them.
Failure OptionNotServed(const std::string& option, const std::string& device,
                        const std::string& worker);
// `offered`: the accepted values, as text.
Failure TuningNotOffered(const std::string& name, int64_t value, const std::string& offered,
                         const std::string& device, const std::string& worker);
// `ready`: the names of the ring's members. The message lists at most 16 of them.
Failure MemberNotReady(const std::string& name, const std::vector<std::string>& ready);
// Planning exceeded its time limit.
Failure PlanningTooLong(const absl::Status& status);
// Too many requests wait for plans.
Failure PlannerBusy(const absl::Status& status, absl::Duration retry_after);
// The ring is smaller than it was, or has just begun to gather.
Failure WorkersMissing(const absl::Status& status, absl::Duration retry_after);
// The request needs `buffers` bytes, and `workspace` if the kernels' need is known, on a worker
// that has `available` bytes in total.
// K/V caches hold `kv_caches` bytes of them.
Failure NeverFits(int rank, const std::string& worker, int64_t buffers, int64_t workspace,
                  int64_t available, int64_t kv_caches = 0);
// A worker that holds no other memory rejected Reserve.
Failure ReserveRefused(int rank, const std::string& worker, int64_t needed,
                       const std::string& reason, absl::Duration retry_after);
// A worker did not answer Reserve within `limit`. The worker stays in the ring.
Failure ReserveSlow(absl::Duration limit, absl::Duration retry_after);
// An internal error, or a worker of another build. A retry fails in the same way.
Failure ReserveMalformed(int rank, const std::string& worker, const std::string& reason);
// A worker may not keep what a request with `prepare` asks for.
Failure NotKept(int rank, const std::string& worker, const std::string& reason);
Failure ComputeFailed(int rank, const std::string& worker, const std::string& reason);
Failure ShardStreamBroken(int rank, const std::string& worker, const std::string& reason,
                          absl::Duration retry_after);
// rank: in the generation.
Failure WorkerLost(int rank, const std::string& worker, const std::string& reason,
                   absl::Duration retry_after);
// The residual does not exist or belongs to another client.
Failure ResidualNotFound();
// The residual existed and has ended.
Failure ResidualEnded(ResidualEnd end);
// The generation ended and no worker is at fault.
Failure RingEnded(const std::string& reason, absl::Duration retry_after);

// --- Tensors that bypass the coordinator (common/request/transport_choice.h).
// The client sent invalid data to a member.
Failure BadShardChunk(int rank, const std::string& worker, const std::string& reason);
// The request's region does not exist or belongs to another client.
Failure RegionUnknown(const std::string& field);
Failure LocationOutsideRegion(const std::string& field, const std::string& tensor, int64_t offset,
                              int64_t bytes, int64_t region_bytes);
Failure TransportUnavailable(const std::string& why);
// The client closed the region's socket, or exited, while its request needed the region.
Failure RegionReleased(int rank, const std::string& worker);
// The same for a request with several clients. The worker's report does not identify the client.
Failure WriterReleasedRegion(int rank, const std::string& worker);
// A member could not copy the tensors.
Failure TransferFailed(int rank, const std::string& worker, const std::string& reason,
                       absl::Duration retry_after);
// --- Attach.
Failure RegionNotFound();
Failure RegionHasAnotherSize(int64_t bytes);
Failure RegionSizeWrong(int64_t bytes, int64_t limit);
Failure TooManyRegions(int64_t own, int64_t limit, absl::Duration retry_after);
Failure RegionHasAnotherKind(bool is_cuda);
Failure NoLocalMemory(bool cuda);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_CLIENT_FAILURES_H_

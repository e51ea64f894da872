// Coordinator: events from clients, and the run and the end of a request.
#include <algorithm>
#include <utility>

#include "common/wire/durations.h"
#include "server/core/coordinator_impl.h"
#include "server/core/requests/client_failures.h"

namespace ringattn::server {

using Phase = Operation::Phase;

namespace {

// The worker copied the tensors between two messages, so its report has the times of the copies.
// Moves them out of the compute stage. Returns the time of the outputs.
absl::Duration MoveCopies(const v1::RankReport& report, BeginDownload* begin) {
  const auto move = [begin](const google::protobuf::Duration& copies) {
    const absl::Duration moved =
        std::clamp(ToDuration(copies), absl::ZeroDuration(), begin->compute_time);
    begin->compute_time -= moved;
    return moved;
  };
  begin->upload_time += move(report.copy_in_time());
  return move(report.copy_out_time());
}

}  // namespace

void Coordinator::Impl::On(RequestArrived& event) {
  if (requests_.Find(event.stream) != nullptr) return;
  const auto refuse = [&](const Failure& why) { requests_.Refuse(event.stream, why); };
  if (draining()) return refuse(Draining(config_.retry_after));

  if (const Request* older = requests_.FindById(event.request_id, event.principal)) {
    if (older->arrived.fingerprint != event.fingerprint) {
      return refuse(RequestIdReused(event.request_id));
    }
    EndRequest(older->stream(), Superseded(event.request_id));
  } else {
    settles_ = false;  // a request without a plan changes no other decision
  }
  if (std::optional<Failure> why = CheckQueue(event)) return refuse(*why);
  if (!event.residual.empty()) {
    const auto why = residuals_.CheckReadable(event.residual, event.principal, event.request_id);
    if (why) return refuse(*why);
    residuals_.Attach(event.residual, event.stream);
  }
  Request& request = requests_.Add(std::move(event));
  queue_.Add(request.stream(), request.arrived.client, request.bytes);
  // Plan immediately, so that a request that can never be planned fails without queueing.
  if (ring_.ready()) AskForPlan(request);
}

std::optional<Failure> Coordinator::Impl::CheckQueue(const RequestArrived& event) const {
  if (event.deadline <= batch_.now()) return DeadlineExceeded("arriving");
  // Before the regions are checked, because regions end with the last worker that attached them.
  if (roster_.empty()) return NoRing(config_.retry_after);
  if (std::optional<Failure> why = regions_.CheckLocations(event.transport, event.principal)) {
    return why;
  }
  const Limits& limits = config_.limits;
  const int64_t bytes = InputBytes(event);
  // A single request always fits; the edge limits its size.
  const auto is_full = [&](const QueueShare& share, int64_t max_requests, int64_t max_bytes) {
    return share.requests >= max_requests ||
           (share.requests > 0 && share.bytes > max_bytes - bytes);
  };
  const QueueShare& all = queue_.all();
  if (is_full(all, limits.max_queued_requests, limits.max_queued_bytes)) {
    return QueueFull(all.requests, all.bytes, limits.max_queued_requests, limits.max_queued_bytes,
                     config_.retry_after);
  }
  const QueueShare own = queue_.Of(event.client);
  const int64_t max_requests = limits.max_queued_requests_per_client;
  const int64_t max_bytes =
      event.terms.max_queued_bytes.value_or(limits.max_queued_bytes_per_client);
  if (is_full(own, max_requests, max_bytes)) {
    return ClientQueueFull(event.client, own.requests, own.bytes, max_requests, max_bytes,
                           config_.retry_after);
  }
  const std::optional<int64_t> max_in_flight = event.terms.max_requests_in_flight;
  if (max_in_flight && requests_.CountOf(event.client) >= *max_in_flight) {
    return ClientInFlightFull(event.client, *max_in_flight, config_.retry_after);
  }
  return std::nullopt;
}

void Coordinator::Impl::On(const RequestEnded& event) { EndRequest(event.stream, event.why); }

void Coordinator::Impl::On(const CancelRequested& event) {
  const Request* request = requests_.FindById(event.request_id, event.principal);
  if (request != nullptr) EndRequest(request->stream(), CancelledByCall());
}

void Coordinator::Impl::On(const UploadProgressed& event) {
  Operation* operation = OperationOf(event.stream);
  if (operation != nullptr) operations_.OnTransferProgress(*operation, Phase::kUploading);
}

void Coordinator::Impl::On(const DownloadProgressed& event) {
  Operation* operation = OperationOf(event.stream);
  if (operation != nullptr) operations_.OnTransferProgress(*operation, Phase::kDownloading);
}

void Coordinator::Impl::On(const MembersStalled& event) {
  Operation* operation = OperationOf(event.stream);
  if (operation != nullptr) operations_.OnStalled(*operation, event.members);
}

void Coordinator::Impl::On(const DownloadFinished& event) {
  Operation* operation = OperationOf(event.stream);
  if (operation == nullptr || operation->phase != Phase::kDownloading) return;
  FinishDownload(*operation);
}

void Coordinator::Impl::FinishDownload(Operation& operation) {
  Request& request = *requests_.Find(*operation.stream);
  if (const std::string& residual = request.arrived.residual; !residual.empty()) {
    residuals_.Read(residual, request.arrived.request_id, request.arrived.keep_residual);
    residuals_.Detach(residual, *operation.stream);
  }
  KeptResidual kept = KeepResidual(request, operation);
  const bool keep = !kept.handle.empty();
  requests_.Succeed(request, {std::move(kept.handle), std::move(kept.reason)});
  if (ring_.ending()) {
    ++completed_ending_;
    ++outlived_losses_;
  }
  operations_.Close(operation, keep);
}

void Coordinator::Impl::On(const ShardStreamFailed& event) {
  Operation* operation = OperationOf(event.stream);
  if (operation == nullptr || operation->pending_failure || event.member < 0 ||
      event.member >= static_cast<int>(operation->members.size())) {
    return;
  }
  const ConnectionId connection = operation->members[event.member].connection;
  operations_.FailLater(*operation,
                        ShardStreamBroken(*ring_.RankOf(connection), roster_.NameOf(connection),
                                          event.reason, config_.retry_after),
                        config_.blame_window);
}

void Coordinator::Impl::CheckRequests() {
  std::optional<absl::Time> ringless_since;
  if (!ring_.ready()) ringless_since = ring_.ringless_since();
  for (const auto& [stream, failure] : requests_.CheckTimers(ringless_since)) {
    EndRequest(stream, failure);
  }
}

void Coordinator::Impl::EndRequest(StreamId stream, const Failure& failure) {
  Request* request = requests_.Find(stream);
  if (request == nullptr) return;
  Operation* operation = OperationOf(stream);
  FailRequest fail = EndQuietly(*request, failure);
  // Members that write into client memory must stop before the client may reuse it, so the failure
  // is held until then.
  if (operation != nullptr && operation->may_write_to_client()) {
    operation->held_failure = std::move(fail);
  } else {
    batch_.Emit(std::move(fail));
  }
  if (operation != nullptr) operations_.Close(*operation);
}

FailRequest Coordinator::Impl::EndQuietly(Request& request, const Failure& failure) {
  const StreamId stream = request.stream();
  StopPlanning(request);
  queue_.Remove(stream);
  // A running request is charged when its run has ended.
  if (order_.Waits(stream)) order_.Finish(stream, request.planning_seconds);
  if (!request.arrived.residual.empty()) residuals_.Detach(request.arrived.residual, stream);
  return requests_.FailSilently(request, failure);
}

void Coordinator::Impl::SendDeferredFailures() {
  if (held_failures_.empty() || ring_.phase() == RingPhase::kTearingDown) return;
  for (FailRequest& held : held_failures_) batch_.Emit(std::move(held));
  held_failures_.clear();
}

Operation* Coordinator::Impl::OperationOf(StreamId stream) {
  const Request* request = requests_.Find(stream);
  return request == nullptr ? nullptr : operations_.Find(request->operation_id);
}

void Coordinator::Impl::StartDueRuns() {
  if (suspicion_.open()) return;
  for (StreamId stream : operations_.StartDueRuns()) {
    Request& request = *requests_.Find(stream);
    request.run_at = batch_.now();
    requests_.SetState(request, v1::REQUEST_STATE_COMPUTING);
  }
}

void Coordinator::Impl::ConcludeRun(Operation& operation) {
  if (!Operations::AllFinished(operation)) return;
  if (!operation.stream) return operations_.ReleaseAll(operation);
  if (operation.pending_failure) {
    const Failure failure = *operation.pending_failure;
    if (operation.pending_failure_due <= batch_.now()) EndRequest(*operation.stream, failure);
    return;
  }
  operations_.BeginDownload(operation);
  Request& request = *requests_.Find(*operation.stream);
  request.download_at = batch_.now();
  if (operation.is_inline()) InformClient(request, operation);
  BeginDownload begin;
  begin.stream = request.stream();
  for (Operation::Member& member : operation.members) {
    begin.reports.push_back(member.report);
    // Only the one member of an inline operation has outputs here.
    if (!member.outputs.empty()) begin.outputs.Swap(&member.outputs);
  }
  begin.queue_time = request.accepted_at - request.arrived_at + operation.run_wait;
  begin.upload_time = request.run_at - request.accepted_at - operation.run_wait;
  begin.compute_time = batch_.now() - request.run_at;
  if (operation.path == Operation::Path::kInlineMemory) {
    request.download_at -= MoveCopies(begin.reports[0], &begin);
  }
  batch_.Emit(std::move(begin));
  requests_.SetState(request, v1::REQUEST_STATE_DOWNLOADING);
  if (Operations::AllDelivered(operation)) FinishDownload(operation);
}

}  // namespace ringattn::server

// Coordinator: events of the clients, and a request's way from the queue to its result.
#include <algorithm>
#include <utility>

#include "server/core/client_failures.h"
#include "server/core/coordinator_impl.h"
#include "server/core/measured_inputs.h"
#include "server/core/placement.h"
#include "server/core/reserve_message.h"

namespace ringattn::server {

using Phase = Operation::Phase;

void Coordinator::Impl::On(const RequestArrived& event) {
  if (requests_.Find(event.stream) != nullptr) return;
  const auto refuse = [&](const Failure& why) { requests_.Refuse(event.stream, why); };
  if (draining_) return refuse(Draining(config_.retry_after));

  if (const Request* older = requests_.FindById(event.request_id)) {
    if (older->arrived.fingerprint != event.fingerprint) {
      return refuse(RequestIdReused(event.request_id));
    }
    EndRequest(older->stream(), Superseded(event.request_id));
  }
  if (event.deadline <= turn_.now()) return refuse(DeadlineExceeded("arriving"));
  if (roster_.empty()) return refuse(NoRing(config_.retry_after));

  // One request always fits: its own size is the edge's to judge.
  const Limits& limits = config_.limits;
  if (queue_.size() >= limits.max_queued_requests ||
      (!queue_.empty() && queue_.bytes() > limits.max_queued_bytes - InputBytes(event))) {
    return refuse(QueueFull(queue_.size(), queue_.bytes(), limits.max_queued_requests,
                            limits.max_queued_bytes, config_.retry_after));
  }

  Request& request = requests_.Add(event);
  queue_.PushBack(request.stream(), request.bytes);
  // A request that can never be planned learns so at once, not behind the queue.
  if (ring_.ready()) EnsurePlanned(request);
}

void Coordinator::Impl::On(const RequestEnded& event) { EndRequest(event.stream, event.why); }

void Coordinator::Impl::On(const CancelRequested& event) {
  const Request* request = requests_.FindById(event.request_id);
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
  requests_.Succeed(*requests_.Find(event.stream));
  operations_.Close(*operation);
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
  queue_.Remove(stream);
  requests_.Fail(*request, failure);
  if (operation != nullptr) operations_.Close(*operation);
}

Operation* Coordinator::Impl::OperationOf(StreamId stream) {
  const Request* request = requests_.Find(stream);
  return request == nullptr ? nullptr : operations_.Find(request->operation_id);
}

// ------------------------------------------------------------------- admission

// Strictly first come first served: a request that waits for memory holds up those behind
// it, so that small ones cannot starve a big one.
void Coordinator::Impl::AdmitQueued() {
  while (ring_.ready() && !suspicion_.open() && !ring_.HoldsForNewcomers() && !queue_.empty() &&
         !operations_.IsReserving()) {
    Request& head = *requests_.Find(queue_.front());
    if (!EnsurePlanned(head)) continue;  // it failed and left the queue
    if (!Admit(head)) return;
  }
}

// False if the request had to be failed.
bool Coordinator::Impl::EnsurePlanned(Request& request) {
  if (request.plan && request.plan_generation == ring_.generation()) return true;
  PlanChoice choice = request.arrived.choice;
  choice.recompute_forward = request.arrived.recompute_forward;
  absl::StatusOr<Plan> plan = PlanRequest(request.arrived.spec, request.arrived.direction, choice,
                                          MeasuredInputs(ring_, roster_, config_.limits));
  if (!plan.ok()) {
    const bool due = ring_.ReplacementIsDue(choice.world_size.value_or(0));
    EndRequest(request.stream(), due ? WorkersMissing(plan.status(), config_.retry_after)
                                     : NotPlannable(plan.status()));
    return false;
  }
  request.plan = *std::move(plan);
  request.plan_generation = ring_.generation();
  request.blocked_until_release = 0;
  request.workspace_bytes.clear();
  return true;
}

// False if it has to wait. REQUIRES: planned.
bool Coordinator::Impl::Admit(Request& request) {
  if (request.blocked_until_release > operations_.releases()) return false;
  const std::vector<int64_t>& bytes = request.plan->buffer_bytes;
  const int64_t buffers = *std::max_element(bytes.begin(), bytes.end());
  std::map<ConnectionId, int64_t> reserved = operations_.ReservedByWorker();
  std::vector<Site> sites;
  for (ConnectionId member : ring_.members()) {
    Site& site = sites.emplace_back();
    site.memory_bytes = roster_.at(member).registration.memory_bytes();
    site.workspace_bytes = request.WorkspaceOn(member);
    site.reserved_bytes = reserved[member];
    site.operations = operations_.CountOn(member);
    site.has_place = site.operations < config_.max_operations_per_worker;
  }
  const Placement placement = Place(sites, buffers, static_cast<int>(bytes.size()));
  switch (placement.answer) {
    case Placement::Answer::kWaits:
      return false;
    case Placement::Answer::kNeverFits: {
      const int rank = placement.roomiest_rank;
      EndRequest(request.stream(),
                 NeverFits(rank, roster_.NameOf(ring_.members()[rank]), buffers,
                           sites[rank].workspace_bytes, sites[rank].memory_bytes));
      return true;
    }
    case Placement::Answer::kPlaced:
      StartOperation(request, placement.ranks);
      return true;
  }
  return false;
}

void Coordinator::Impl::StartOperation(Request& request, const std::vector<int>& ranks) {
  queue_.Remove(request.stream());
  request.operation_id = operations_.NextId(ring_.generation());
  std::vector<ConnectionId> members;
  std::vector<int64_t> bytes = request.plan->buffer_bytes;
  for (int rank : ranks) {
    const ConnectionId member = ring_.members()[rank];
    bytes[members.size()] += request.WorkspaceOn(member);
    members.push_back(member);
  }
  const v1::Reserve reserve = MakeReserve(request.arrived, *request.plan, request.operation_id,
                                          ring_.generation(), {ranks.begin(), ranks.end()});
  const absl::Duration progress_timeout =
      std::max(config_.progress_timeout,
               config_.progress_factor * absl::Seconds(request.plan->predicted_step_seconds));
  operations_.Start(request.stream(), reserve, members, bytes, progress_timeout);
}

// All or nothing: what the others set aside goes back before the next attempt.
void Coordinator::Impl::Refuse(Operation& operation, const Operation::Member& by,
                               const v1::Reserved& reserved) {
  Request& request = *requests_.Find(*operation.stream);
  operation.was_refused = true;
  // The plan knows the buffers alone. What the kernels need beside them is news once:
  // with it admission decides anew whether the request waits, fits elsewhere or never does.
  const bool is_news = by.workspace_bytes > request.WorkspaceOn(by.connection);
  if (is_news) {
    request.workspace_bytes[by.connection] = by.workspace_bytes;
  } else if (operations_.OthersHoldMemoryOn(by.connection)) {
    request.blocked_until_release = operations_.releases() + 1;
  } else {
    return EndRequest(request.stream(),
                      ReserveRefused(*ring_.RankOf(by.connection), roster_.NameOf(by.connection),
                                     by.bytes, reserved.reason(), config_.retry_after));
  }
  Requeue(operation);
  operations_.Withdraw(operation);
}

// The head of the queue again: one operation reserves at a time, so none that came
// later can have gone before it.
void Coordinator::Impl::Requeue(Operation& operation) {
  Request& request = *requests_.Find(*operation.stream);
  request.operation_id.clear();
  queue_.PushFront(request.stream(), request.bytes);
}

void Coordinator::Impl::Accept(Operation& operation) {
  Request& request = *requests_.Find(*operation.stream);
  request.accepted_at = turn_.now();
  request.generation = ring_.generation();

  request.plan->workspace_bytes.clear();
  for (const Operation::Member& member : operation.members) {
    request.plan->workspace_bytes.push_back(member.workspace_bytes);
  }

  AcceptRequest accept;
  accept.stream = request.stream();
  accept.request_id = request.arrived.request_id;
  accept.operation_id = operation.id;
  accept.generation = ring_.generation();
  accept.plan = *request.plan;
  for (const Operation::Member& member : operation.members) {
    const v1::Register& registration = roster_.at(member.connection).registration;
    accept.members.push_back({member.connection, registration.name(), registration.data_address()});
    request.member_names.push_back(registration.name());
  }
  turn_.Emit(std::move(accept));
  requests_.SetState(request, v1::OPERATION_STATE_UPLOADING);
  operations_.Accept(operation);
}

// ------------------------------------------------------------------------ runs

void Coordinator::Impl::StartDueRuns() {
  if (suspicion_.open()) return;
  for (StreamId stream : operations_.StartDueRuns()) {
    Request& request = *requests_.Find(stream);
    request.run_at = turn_.now();
    requests_.SetState(request, v1::OPERATION_STATE_COMPUTING);
  }
}

void Coordinator::Impl::ConcludeRun(Operation& operation) {
  if (!Operations::AllFinished(operation)) return;
  if (!operation.stream) return operations_.ReleaseAll(operation);
  if (operation.pending_failure) {
    const Failure failure = *operation.pending_failure;
    if (operation.pending_failure_due <= turn_.now()) EndRequest(*operation.stream, failure);
    return;
  }
  operations_.BeginDownload(operation);
  Request& request = *requests_.Find(*operation.stream);
  request.download_at = turn_.now();
  BeginDownload begin;
  begin.stream = request.stream();
  for (const Operation::Member& member : operation.members) begin.reports.push_back(member.report);
  begin.queue_time = request.accepted_at - request.arrived_at;
  begin.upload_time = request.run_at - request.accepted_at;
  begin.compute_time = turn_.now() - request.run_at;
  turn_.Emit(std::move(begin));
  requests_.SetState(request, v1::OPERATION_STATE_DOWNLOADING);
}

}  // namespace ringattn::server

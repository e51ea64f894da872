// Coordinator: events of the clients, and a request's way from the queue to its result.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/security/token.h"
#include "server/core/client_failures.h"
#include "server/core/coordinator_impl.h"
#include "server/core/measured_inputs.h"
#include "server/core/placement.h"
#include "server/core/planning_cost.h"
#include "server/core/reserve_message.h"
#include "server/core/worker_offers.h"

namespace ringattn::server {

using Phase = Operation::Phase;

namespace {

// Written for every member on the core's thread; at an estimated 20 ns each, 3 ms.
constexpr int64_t kMaxDocumentsPerTurn = int64_t{1} << 17;

// Members are chosen before ranks, so each must have room for the largest.
int64_t LargestBuffers(const Plan& plan) {
  return *std::max_element(plan.buffer_bytes.begin(), plan.buffer_bytes.end());
}

// Whether the client would have this worker.
bool MayServe(const PlanChoice& choice, const std::string& worker) {
  const std::vector<std::string>& named = choice.members;
  return named.empty() || std::find(named.begin(), named.end(), worker) != named.end();
}

}  // namespace

void Coordinator::Impl::On(RequestArrived& event) {
  if (requests_.Find(event.stream) != nullptr) return;
  const auto refuse = [&](const Failure& why) { requests_.Refuse(event.stream, why); };
  if (draining_) return refuse(Draining(config_.retry_after));

  if (const Request* older = requests_.FindById(event.request_id, event.principal)) {
    if (older->arrived.fingerprint != event.fingerprint) {
      return refuse(RequestIdReused(event.request_id));
    }
    EndRequest(older->stream(), Superseded(event.request_id));
  }
  if (std::optional<Failure> why = WhyNotQueued(event)) return refuse(*why);
  if (!event.residual.empty()) {
    const auto why = residuals_.WhyNot(event.residual, event.principal, event.request_id);
    if (why) return refuse(*why);
    residuals_.Attach(event.residual, event.stream);
  }
  Request& request = requests_.Add(std::move(event));
  queue_.Add(request.stream(), request.arrived.client, request.bytes);
  // A request that can never be planned learns so at once, not behind the queue.
  if (ring_.ready()) AskForPlan(request);
}

std::optional<Failure> Coordinator::Impl::WhyNotQueued(const RequestArrived& event) const {
  if (event.deadline <= turn_.now()) return DeadlineExceeded("arriving");
  if (std::optional<Failure> why = regions_.WhyRefused(event.transport, event.principal)) {
    return why;
  }
  if (roster_.empty()) return NoRing(config_.retry_after);
  const Limits& limits = config_.limits;
  const int64_t bytes = InputBytes(event);
  // One request always fits: its own size is the edge's to judge.
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
  requests_.Succeed(request, std::move(kept.handle), std::move(kept.reason));
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
  FailRequest told = EndQuietly(*request, failure);
  // Where members write into the client's memory, it learns of the end when they do not any
  // more: then the memory is its own again.
  if (operation != nullptr && operation->by_host_memory && operation->was_accepted) {
    operation->held_failure = std::move(told);
  } else {
    turn_.Emit(std::move(told));
  }
  if (operation != nullptr) operations_.Close(*operation);
}

FailRequest Coordinator::Impl::EndQuietly(Request& request, const Failure& failure) {
  const StreamId stream = request.stream();
  StopPlanning(request);
  queue_.Remove(stream);
  // What runs is charged when it has ended.
  if (order_.Waits(stream)) order_.Finish(stream, request.planning_seconds);
  if (!request.arrived.residual.empty()) residuals_.Detach(request.arrived.residual, stream);
  return requests_.FailSilently(request, failure);
}

void Coordinator::Impl::TellHeldFailures() {
  if (held_failures_.empty() || ring_.phase() == RingPhase::kTearingDown) return;
  for (FailRequest& held : held_failures_) turn_.Emit(std::move(held));
  held_failures_.clear();
}

Operation* Coordinator::Impl::OperationOf(StreamId stream) {
  const Request* request = requests_.Find(stream);
  return request == nullptr ? nullptr : operations_.Find(request->operation_id);
}

// -------------------------------------------------------------------- planning

// For another ring, plans are others.
void Coordinator::Impl::AskForPlans() {
  if (!ring_.ready() || plans_asked_ == ring_.generation()) return;
  plans_asked_ = ring_.generation();
  for (const auto& [stream, entry] : queue_.entries()) AskForPlan(*requests_.Find(stream));
}

void Coordinator::Impl::AskForPlan(Request& request) {
  if (request.asked_generation == ring_.generation()) return;
  request.asked_generation = ring_.generation();
  PlanThis ask;
  ask.stream = request.stream();
  ask.generation = ring_.generation();
  ask.client = request.arrived.client;
  ask.fingerprint = request.arrived.fingerprint;
  ask.spec = request.spec;
  ask.direction = request.arrived.direction;
  ask.choice = request.arrived.choice;
  ask.choice.recompute_forward = request.arrived.recompute_forward;
  ask.choice.keeps_inputs = request.retains();
  if (const Residual* residual = residuals_.Find(request.arrived.residual)) {
    ask.fingerprint = residual->fingerprint + 1;  // its own differs from every other's
  }
  ask.inputs = MeasuredInputs(ring_, roster_, config_.limits, *ask.spec, ask.direction);
  ask.cost_seconds = PlanningCostSeconds(*ask.spec, ask.choice, ask.inputs);
  turn_.Emit(std::move(ask));
}

void Coordinator::Impl::StopPlanning(Request& request) {
  if (std::exchange(request.asked_generation, 0) != 0) turn_.Emit(CancelPlan{request.stream()});
}

void Coordinator::Impl::On(const Planned& event) {
  Request* request = requests_.Find(event.stream);
  if (request == nullptr || request->asked_generation != event.generation || !ring_.ready() ||
      event.generation != ring_.generation()) {
    return;
  }
  request->asked_generation = 0;
  request->planning_seconds += event.seconds;
  const Residual* residual = residuals_.Find(request->arrived.residual);
  if (residual != nullptr && !IsInRing(*residual)) return LoseResidual(residual->handle);
  for (const std::string& name : request->arrived.choice.members) {
    if (!RankOf(name).has_value()) return EndRequest(event.stream, MemberNotReady(name));
  }
  if (!event.plan.ok()) {
    return EndRequest(event.stream, WhyNotPlanned(*request, event.plan.status()));
  }
  const Plan& plan = **event.plan;
  if (std::optional<Failure> why = WhyNotServed(*request, plan.shards.world_size)) {
    return EndRequest(event.stream, *why);
  }
  const absl::Duration predicted = absl::Seconds(plan.predicted_compute_seconds);
  const absl::Duration left = request->arrived.deadline - turn_.now();
  if (predicted / config_.run_time_factor > left) {
    return EndRequest(event.stream, DeadlineTooShort(predicted, left));
  }
  request->plan = *event.plan;
  request->plan_generation = ring_.generation();
  request->blocked_until_release = 0;
  request->reserves_alone = false;
  request->workspace_bytes.clear();
  // What it will occupy, and what it has taken already, are its client's.
  if (!order_.Has(event.stream)) {
    const double cost = plan.predicted_compute_seconds * plan.shards.world_size;
    order_.Enter(event.stream, request->arrived.client, cost + request->planning_seconds,
                 request->arrived.terms.weight);
  }
}

// The failure, if too few members have kernels for a request of this many.
std::optional<Failure> Coordinator::Impl::WhyNotServed(const Request& request,
                                                       int world_size) const {
  const PlanChoice& choice = request.arrived.choice;
  int serving = 0;
  std::optional<Failure> first_why;
  for (ConnectionId member : ring_.members()) {
    const v1::Register& registration = roster_.at(member).registration;
    if (!MayServe(choice, registration.name())) continue;
    const std::optional<Failure> why = WhyNotServedBy(registration, *request.spec, choice);
    serving += why.has_value() ? 0 : 1;
    if (!first_why.has_value()) first_why = why;
  }
  if (serving >= world_size) return std::nullopt;
  return first_why;
}

std::optional<int> Coordinator::Impl::RankOf(const std::string& worker) const {
  for (size_t rank = 0; rank < ring_.members().size(); ++rank) {
    if (roster_.NameOf(ring_.members()[rank]) == worker) return static_cast<int>(rank);
  }
  return std::nullopt;
}

Failure Coordinator::Impl::WhyNotPlanned(const Request& request, const absl::Status& status) const {
  if (absl::IsDeadlineExceeded(status)) return PlanningTooLong(status);
  if (absl::IsResourceExhausted(status)) return PlannerBusy(status, config_.retry_after);
  const bool due = ring_.ReplacementIsDue(request.arrived.choice.world_size.value_or(0));
  return due ? WorkersMissing(status, config_.retry_after) : NotPlannable(status);
}

// ------------------------------------------------------------------- admission

// Each when its turn comes; as many at once as there is room for. One that waits for memory
// holds up those behind it, so that small ones cannot starve a big one; one that waits for
// a place lets only those pass that take an express place.
void Coordinator::Impl::AdmitQueued() {
  if (!ring_.ready() || suspicion_.open() || ring_.HoldsAdmission() || queue_.empty()) return;
  int64_t documents = 0;  // that Reserve messages of this turn list
  bool only_express = false;
  std::vector<Site> sites = Sites();
  for (StreamId stream : Admissible()) {
    Request* const found = requests_.Find(stream);
    if (found == nullptr) continue;  // its residual made room for another
    Request& request = *found;
    if (request.blocked_until_release > operations_.releases()) return;
    if (operations_.OneReservesAlone()) return;
    if (request.reserves_alone && operations_.OthersReserve(nullptr)) return;
    const Residual* residual = residuals_.Find(request.arrived.residual);
    if (residual != nullptr && !IsInRing(*residual)) {
      LoseResidual(residual->handle);
      continue;
    }
    Placement placement = PlaceRequest(request, &sites, only_express);
    if (placement.answer == Placement::Answer::kWaitsForMemory && MakeRoomFor(request)) {
      sites = Sites();
      placement = PlaceRequest(request, &sites, only_express);
    }
    switch (placement.answer) {
      case Placement::Answer::kWaitsForMemory:
        return;
      case Placement::Answer::kWaitsForPlaces:
        only_express = true;
        break;
      case Placement::Answer::kNeverFits: {
        if (request.retains()) {
          StopRetaining(request, "no worker has the memory to keep the inputs as they are");
          break;
        }
        if (residual != nullptr) {  // the tensors themselves may fit: they need not stay
          LoseResidual(residual->handle);
          break;
        }
        const ConnectionId on = ring_.members()[placement.roomiest_rank];
        EndRequest(stream, NeverFits(placement.roomiest_rank, roster_.NameOf(on),
                                     LargestBuffers(*request.plan), request.WorkspaceOn(on),
                                     roster_.at(on).registration.memory_bytes()));
        break;
      }
      case Placement::Answer::kPlaced:
        if (std::optional<Failure> why = ChooseTransport(request, placement)) {
          EndRequest(stream, *why);
          break;
        }
        documents += request.spec->shape.num_documents() * placement.ranks.size();
        StartOperation(request, placement);
        sites = Sites();
        // The next event goes on: nobody's heartbeat waits for more than this.
        if (documents > kMaxDocumentsPerTurn) return;
        break;
    }
  }
}

// Those with a plan, by turns.
std::vector<StreamId> Coordinator::Impl::Admissible() const {
  std::vector<StreamId> streams;
  for (const auto& [stream, entry] : queue_.entries()) {
    const Request& request = *requests_.Find(stream);
    if (request.plan != nullptr && request.plan_generation == ring_.generation()) {
      streams.push_back(stream);
    }
  }
  order_.Sort(&streams);
  return streams;
}

std::vector<Site> Coordinator::Impl::Sites() const {
  std::vector<Site> sites;
  for (ConnectionId member : ring_.members()) {
    sites.push_back(operations_.SiteOf(member));
    sites.back().memory_bytes = roster_.at(member).registration.memory_bytes();
    const auto kept = residuals_.bytes_by_worker().find(member);
    if (kept != residuals_.bytes_by_worker().end()) sites.back().reserved_bytes += kept->second;
  }
  return sites;
}

Placement Coordinator::Impl::PlaceRequest(const Request& request, std::vector<Site>* sites,
                                          bool only_express) const {
  for (size_t rank = 0; rank < sites->size(); ++rank) {
    const ConnectionId member = ring_.members()[rank];
    (*sites)[rank].workspace_bytes = request.WorkspaceOn(member);
    const v1::Register& registration = roster_.at(member).registration;
    const PlanChoice& choice = request.arrived.choice;
    (*sites)[rank].serves = MayServe(choice, registration.name()) &&
                            !WhyNotServedBy(registration, *request.spec, choice).has_value();
  }
  PlacementRequest wanted;
  wanted.client = request.arrived.client;
  wanted.cost_seconds = order_.CostOf(request.stream());
  wanted.buffer_bytes = LargestBuffers(*request.plan);
  wanted.count = static_cast<int>(request.plan->buffer_bytes.size());
  wanted.many_documents = request.many_documents;
  if (const Residual* residual = residuals_.Find(request.arrived.residual)) {
    return PlaceReader(*residual, wanted, *sites, only_express);
  }
  Placement placement = Place(
      *sites, wanted, {config_.max_operations_per_worker, config_.express_operations_per_worker()},
      only_express);
  const std::vector<std::string>& named = request.arrived.choice.members;
  if (placement.answer != Placement::Answer::kPlaced || named.empty()) return placement;
  // They are the only ones that may serve it; the order is the client's.
  placement.ranks.clear();
  for (const std::string& name : named) placement.ranks.push_back(*RankOf(name));
  return placement;
}

// The failure, if the request requires what it cannot have.
std::optional<Failure> Coordinator::Impl::ChooseTransport(Request& request,
                                                          const Placement& placement) const {
  TransportRoute route;
  for (int rank : placement.ranks) route.members.push_back(ring_.members()[rank]);
  route.spans = request.plan->spans;
  route.max_ticket_spans = config_.limits.max_ticket_spans;
  std::variant<TransportDecision, Failure> decision =
      DecideTransport(request.arrived.transport, regions_, roster_, route);
  if (auto* failure = std::get_if<Failure>(&decision)) return *std::move(failure);
  request.transport = std::get<TransportDecision>(std::move(decision));
  return std::nullopt;
}

void Coordinator::Impl::StartOperation(Request& request, const Placement& placement) {
  queue_.Remove(request.stream());
  const Plan& plan = *request.plan;
  request.operation_id = operations_.NextId(ring_.generation());
  Operations::Order order;
  order.stream = request.stream();
  order.client = request.arrived.client;
  order.cost_seconds = order_.CostOf(request.stream());
  order.planning_seconds = request.planning_seconds;
  order.run_seconds = plan.predicted_compute_seconds;
  order.step_seconds = plan.predicted_step_seconds;
  order.is_express = placement.is_express;
  order.reserves_alone = request.reserves_alone;
  order.bytes = plan.buffer_bytes;
  const Residual* residual = residuals_.Find(request.arrived.residual);
  if (residual != nullptr) {
    order.residual = residual->handle;
    for (size_t rank = 0; rank < order.bytes.size(); ++rank) {
      order.bytes[rank] -= residual->members[rank].bytes;
    }
  }
  for (int rank : placement.ranks) {
    const ConnectionId member = ring_.members()[rank];
    order.bytes[order.members.size()] += request.WorkspaceOn(member);
    order.members.push_back(member);
  }
  order.reserve = MakeReserve(request.arrived, *request.spec, plan, request.operation_id,
                              ring_.generation(), {placement.ranks.begin(), placement.ranks.end()});
  if (residual != nullptr) order.reserve.set_residual(residual->operation_id);
  if (request.transport.transport == v1::TRANSPORT_HOST_MEMORY ||
      request.transport.transport == v1::TRANSPORT_CUDA_MEMORY) {
    AddPlaces(request.arrived.transport, &order.reserve);
  } else if (request.transport.transport == v1::TRANSPORT_DIRECT_STREAM) {
    for (size_t rank = 0; rank < order.members.size(); ++rank) {
      order.tokens.push_back(TokenOf(request, static_cast<int>(rank)));
    }
  }
  operations_.Start(order);
}

// What a client shows to the member of its operation, and to no other one. The operation's id
// has the generation in it, and no id comes twice.
std::string Coordinator::Impl::TokenOf(const Request& request, int ring_rank) {
  return DeriveToken(request.arrived.token_seed,
                     absl::StrCat(request.operation_id, " ", ring_rank));
}

// All or nothing: what the others set aside goes back before the next attempt.
void Coordinator::Impl::Refuse(Operation& operation, const Operation::Member& by,
                               const v1::Reserved& reserved) {
  Request& request = *requests_.Find(*operation.stream);
  operation.was_refused = true;
  if (reserved.residual_missing()) {
    const StreamId stream = request.stream();
    LoseResidual(request.arrived.residual);
    return EndRequest(stream, ResidualGone(ResidualEnd::kLost));
  }
  if (reserved.malformed()) {
    return EndRequest(request.stream(),
                      ReserveMalformed(*ring_.RankOf(by.connection), roster_.NameOf(by.connection),
                                       reserved.reason()));
  }
  // The plan knows the buffers alone. What the kernels need beside them is news once:
  // with it admission decides anew whether the request waits, fits elsewhere or never does.
  const bool is_news = by.workspace_bytes > request.WorkspaceOn(by.connection);
  if (is_news) {
    request.workspace_bytes[by.connection] = by.workspace_bytes;
  } else if (operations_.OthersHoldMemoryOn(by.connection)) {
    request.blocked_until_release = operations_.releases() + 1;
  } else if (operations_.OthersReserve(&operation)) {
    // Each may have had what the other lacked.
    request.reserves_alone = true;
  } else if (request.retains()) {
    Requeue(operation);
    operations_.Withdraw(operation);
    return StopRetaining(request, "a worker lacks the memory to keep the inputs as they are");
  } else if (EvictOneOn(by.connection, request.arrived.residual)) {
    // Tried again now.
  } else {
    return EndRequest(request.stream(),
                      ReserveRefused(*ring_.RankOf(by.connection), roster_.NameOf(by.connection),
                                     by.bytes, reserved.reason(), config_.retry_after));
  }
  Requeue(operation);
  operations_.Withdraw(operation);
}

// It keeps its turn.
void Coordinator::Impl::Requeue(Operation& operation) {
  Request& request = *requests_.Find(*operation.stream);
  request.operation_id.clear();
  queue_.Add(request.stream(), request.arrived.client, request.bytes);
}

void Coordinator::Impl::Accept(Operation& operation) {
  Request& request = *requests_.Find(*operation.stream);
  request.accepted_at = turn_.now();
  request.generation = ring_.generation();

  Plan plan = *request.plan;
  plan.workspace_bytes.clear();
  for (const Operation::Member& member : operation.members) {
    plan.workspace_bytes.push_back(member.workspace_bytes);
  }
  request.plan = std::make_shared<const Plan>(std::move(plan));

  AcceptRequest accept;
  accept.stream = request.stream();
  accept.request_id = request.arrived.request_id;
  accept.operation_id = operation.id;
  accept.generation = ring_.generation();
  accept.plan = request.plan;
  accept.transport = request.transport.transport;
  accept.transport_reason = request.transport.reason;
  if (!request.retains()) request.spec.reset();  // nobody needs it any more
  for (const Operation::Member& member : operation.members) {
    const v1::Register& registration = roster_.at(member.connection).registration;
    RingMember& told = accept.members.emplace_back(
        RingMember{member.connection, registration.name(), registration.data_address()});
    if (accept.transport == v1::TRANSPORT_DIRECT_STREAM) {
      told.client_data_address = registration.client_data_address();
      told.token = TokenOf(request, static_cast<int>(accept.members.size()) - 1);
    }
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
  begin.queue_time = request.accepted_at - request.arrived_at + operation.turn_wait;
  begin.upload_time = request.run_at - request.accepted_at - operation.turn_wait;
  begin.compute_time = turn_.now() - request.run_at;
  turn_.Emit(std::move(begin));
  requests_.SetState(request, v1::OPERATION_STATE_DOWNLOADING);
  if (Operations::AllDelivered(operation)) FinishDownload(operation);
}

}  // namespace ringattn::server

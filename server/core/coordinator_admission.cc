// Coordinator: admission of requests, from the queue to the members' reservations.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/security/token.h"
#include "common/wire/durations.h"
#include "server/core/coordinator_impl.h"
#include "server/core/requests/client_failures.h"
#include "server/core/requests/placement.h"
#include "server/core/requests/reserve_message.h"

namespace ringattn::server {
namespace {

// Per event: Reserve lists the documents for every member on the core's thread, at about 20 ns
// each, 3 ms in total.
constexpr int64_t kMaxDocumentsPerEvent = int64_t{1} << 17;

int64_t OutputBytes(const Request& request) {
  int64_t bytes = 0;
  for (TensorId id : OutputsOf(*request.spec, request.arrived.direction)) {
    bytes += BytesOf(*request.spec, id);
  }
  return bytes;
}

}  // namespace

// Admits queued requests in order, as many as fit. A request that waits for memory blocks the
// requests after it, so that small requests cannot starve a large one. After a request that waits
// for a slot, only requests that take an express slot are admitted.
void Coordinator::Impl::AdmitQueued() {
  if (!ring_.ready() || suspicion_.open() || ring_.HoldsAdmission() || queue_.empty()) return;
  Admission admission;
  while (const std::optional<Admission::Decision> decision = NextDecision(&admission)) {
    if (!CarryOut(*decision, &admission)) return;
  }
  // A request that can never be placed fails at once, although others go before it.
  for (StreamId stream : queue_.TakeNew()) {
    const RequestQueue::Entry* const entry = queue_.Find(stream);
    if (entry == nullptr || !entry->needs) continue;  // an earlier one of these ended it
    Request& request = *requests_.Find(stream);
    if (!HasPlan(request)) continue;
    if (admission.sites.empty()) admission.sites = Sites();
    if (entry->needs->memory_bytes <= LeastBytes(admission.sites).total) continue;
    const Placement placement = PlaceRequest(request, &admission.sites, /*only_express=*/true);
    if (placement.result == Placement::Result::kNeverFits) GiveUpPlacing(request, placement);
  }
}

bool Coordinator::Impl::HasPlan(const Request& request) const {
  return request.plan != nullptr && request.plan_generation == ring_.generation();
}

// Many requests may wait for the same slots. While no slot is free for any of them, an event looks
// at none.
std::optional<Coordinator::Impl::Admission::Decision> Coordinator::Impl::NextDecision(
    Admission* admission) {
  using Visit = FairOrder::Visit;
  std::vector<Site>& sites = admission->sites;
  if (sites.empty()) sites = Sites();
  admission->only_express |= !HasCommonSlot(sites, SlotsPerMember());
  const bool one_reserves_alone = operations_.OneReservesAlone();
  const int64_t free_bytes = LeastBytes(sites).free;
  // Returns whether one of these requests might be placed, waits for memory or is special. All
  // others wait for a slot.
  const auto matters = [&](const QueueNeeds& needs, const std::string* client) {
    return needs.is_special || needs.memory_bytes > free_bytes ||
           MightTakeExpress(sites, client, needs.cost_seconds, SlotsPerMember());
  };
  std::optional<bool> any_matters;
  std::optional<Admission::Decision> decision;
  order_.VisitWaiting([&](StreamId stream, const std::string& client) {
    const RequestQueue::Entry* const entry = queue_.Find(stream);
    if (entry == nullptr) return Visit::kNext;  // it has been placed and waits for its run
    if (admission->only_express) {
      if (!any_matters) any_matters = matters(queue_.extremes(), nullptr);
      if (!*any_matters) return Visit::kStop;
      if (!matters(queue_.ExtremesOf(client), &client)) return Visit::kSkipClient;
      if (entry->needs && !matters(*entry->needs, &client)) return Visit::kNext;
    }
    const Request& request = *requests_.Find(stream);
    if (!HasPlan(request)) return Visit::kNext;
    decision.emplace();
    decision->stream = stream;
    const Residual* residual = residuals_.Find(request.arrived.residual);
    if (request.blocked_until_release > operations_.releases() || one_reserves_alone ||
        (request.reserves_alone && operations_.OthersReserve(nullptr))) {
      decision->waits_for_others = true;
    } else if (residual != nullptr && !IsInRing(*residual)) {
      decision->lost_residual = true;
    } else {
      decision->placement = PlaceRequest(request, &sites, admission->only_express);
      if (decision->placement.result == Placement::Result::kWaitsForSlots) {
        admission->only_express = true;
        decision.reset();
        return Visit::kNext;
      }
    }
    return Visit::kStop;
  });
  return decision;
}

// Returns false if nothing more is admitted in this event.
bool Coordinator::Impl::CarryOut(const Admission::Decision& decision, Admission* admission) {
  Request& request = *requests_.Find(decision.stream);
  if (decision.waits_for_others) return false;
  if (decision.lost_residual) {
    LoseResidual(std::string(request.arrived.residual));
    admission->sites.clear();
    return true;
  }
  switch (decision.placement.result) {
    case Placement::Result::kWaitsForMemory:
      if (!MakeRoomFor(request)) return false;
      admission->sites.clear();
      return true;
    case Placement::Result::kWaitsForSlots:
      return true;  // NextDecision goes on to the next request
    case Placement::Result::kNeverFits:
      GiveUpPlacing(request, decision.placement);
      return true;
    case Placement::Result::kPlaced:
      break;
  }
  if (request.arrived.prepare_ttl) {
    request.transport.transport = v1::TRANSPORT_UNSPECIFIED;
  } else if (std::optional<Failure> why = ChooseTransport(request, decision.placement)) {
    EndRequest(decision.stream, *why);
    return true;
  }
  admission->documents +=
      request.spec->shape.num_documents() * static_cast<int64_t>(decision.placement.ranks.size());
  StartOperation(request, decision.placement);
  admission->sites.clear();
  // The next event continues, so that heartbeats wait no longer than this.
  return admission->documents <= kMaxDocumentsPerEvent;
}

// The plan fits nowhere, even on idle members. Changes the request or ends it.
void Coordinator::Impl::GiveUpPlacing(Request& request, const Placement& placement) {
  if (request.plan->may_grow) {  // the workers of further hosts each need less memory
    return PlanForMoreWorkers(request);
  }
  if (request.retains()) {
    return StopRetaining(request, "no worker has the memory to keep the inputs as they are");
  }
  // Without the residual, the tensors may fit.
  if (const Residual* residual = residuals_.Find(request.arrived.residual)) {
    return LoseResidual(std::string(residual->handle));
  }
  const ConnectionId on = ring_.members()[placement.roomiest_rank];
  EndRequest(request.stream(),
             NeverFits(placement.roomiest_rank, roster_.NameOf(on), LargestBuffers(*request.plan),
                       request.WorkspaceOn(on), roster_.at(on).registration.memory_bytes(),
                       kv_caches_.BytesOn(on)));
}

// Asks for a plan with more workers than the one that does not fit.
void Coordinator::Impl::PlanForMoreWorkers(Request& request) {
  request.min_world_size = request.plan->shards.world_size + 1;
  request.plan = nullptr;
  AskForPlan(request);
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
  order.run_seconds = request.RunSeconds(plan);
  order.step_seconds = plan.predicted_step_seconds;
  order.is_express = placement.is_express;
  order.reserves_alone = request.reserves_alone;
  order.may_preempt = std::all_of(placement.ranks.begin(), placement.ranks.end(), [&](int rank) {
    return roster_.at(ring_.members()[rank]).registration.preempts();
  });
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
  if (request.arrived.prepare_ttl) {
    SetDuration(*request.arrived.prepare_ttl, order.reserve.mutable_prepare_only()->mutable_ttl());
  } else if (request.transport.transport == v1::TRANSPORT_HOST_MEMORY ||
             request.transport.transport == v1::TRANSPORT_CUDA_MEMORY) {
    AddLocations(request.arrived.transport, &order.reserve);
  } else if (request.transport.transport == v1::TRANSPORT_DIRECT) {
    for (size_t rank = 0; rank < order.members.size(); ++rank) {
      order.tokens.push_back(TokenOf(request, static_cast<int>(rank)));
    }
  }
  AddWriters(request.arrived.transport, &order.reserve);
  if (MayBeInline(request, order)) order.inline_inputs = request.arrived.inline_inputs;
  order.may_be_inline_in_memory = MayBeInlineInMemory(request, order);
  if (!operations_.Start(std::move(order))) return;
  request.accepted_at = request.run_at = batch_.now();
  requests_.SetState(request, v1::REQUEST_STATE_COMPUTING);
}

// Returns whether all tensors of the request fit into control messages.
bool Coordinator::Impl::MayBeInline(const Request& request, const Operations::Order& order) const {
  if (request.arrived.inline_inputs == nullptr) return false;
  if (request.transport.transport != v1::TRANSPORT_RELAY || !OneMessageMaySuffice(request, order)) {
    return false;
  }
  return std::max(request.bytes, OutputBytes(request)) <= kMaxInlineRunBytes;
}

// Returns whether the worker can copy all tensors of the request within one message each way.
bool Coordinator::Impl::MayBeInlineInMemory(const Request& request,
                                            const Operations::Order& order) const {
  if (order.reserve.places().empty() || !request.arrived.transport.writers.empty()) return false;
  if (!OneMessageMaySuffice(request, order)) return false;
  return request.bytes + OutputBytes(request) <= kMaxInlineCopyBytes;
}

bool Coordinator::Impl::OneMessageMaySuffice(const Request& request,
                                             const Operations::Order& order) const {
  if (request.arrived.prepare_ttl || request.was_refused_inline || request.reserves_alone) {
    return false;
  }
  if (order.members.size() != 1) return false;
  if (!roster_.at(order.members[0]).registration.runs_inline()) return false;
  // A residual lives longer than its operation. A worker decodes many documents in the background.
  return !request.retains() && order.residual.empty() && !request.many_documents;
}

// Returns the token that the client presents to one member of the operation. Tokens never repeat,
// because an operation's id contains its generation and is unique.
std::string Coordinator::Impl::TokenOf(const Request& request, int ring_rank) {
  return DeriveToken(request.arrived.token_seed,
                     absl::StrCat(request.operation_id, " ", ring_rank));
}

// A reservation is all or nothing: the other members release theirs before the next attempt.
void Coordinator::Impl::Refuse(Operation& operation, const Operation::Member& by,
                               const v1::Reserved& reserved) {
  Request& request = *requests_.Find(*operation.stream);
  operation.reservation = Operation::Reservation::kRejected;
  if (reserved.residual_missing()) {
    const StreamId stream = request.stream();
    LoseResidual(request.arrived.residual);
    return EndRequest(stream, ResidualEnded(ResidualEnd::kLost));
  }
  if (reserved.malformed()) {
    return EndRequest(request.stream(),
                      ReserveMalformed(*ring_.RankOf(by.connection), roster_.NameOf(by.connection),
                                       reserved.reason()));
  }
  if (reserved.not_kept()) {
    return EndRequest(request.stream(), NotKept(*ring_.RankOf(by.connection),
                                                roster_.NameOf(by.connection), reserved.reason()));
  }
  // The plan covers buffers only. The kernels' workspace becomes known with the first rejection;
  // admission then decides again whether the request waits, fits elsewhere or never fits.
  const bool is_news = by.workspace_bytes > request.WorkspaceOn(by.connection);
  if (is_news) {
    request.workspace_bytes[by.connection] = by.workspace_bytes;
  } else if (operations_.OthersHoldMemoryOn(by.connection)) {
    request.blocked_until_release = operations_.releases() + 1;
  } else if (operations_.OthersReserve(&operation)) {
    // Each may hold what the other lacked.
    request.reserves_alone = true;
  } else if (request.retains()) {
    Requeue(operation);
    operations_.Withdraw(operation);
    return StopRetaining(request, "a worker lacks the memory to keep the inputs as they are");
  } else if (EvictOneOn(by.connection, request.arrived.residual)) {
    // Retried immediately.
  } else {
    return EndRequest(request.stream(),
                      ReserveRefused(*ring_.RankOf(by.connection), roster_.NameOf(by.connection),
                                     by.bytes, reserved.reason(), config_.retry_after));
  }
  Requeue(operation);
  operations_.Withdraw(operation);
}

// The request keeps its position.
void Coordinator::Impl::Requeue(Operation& operation) {
  Request& request = *requests_.Find(*operation.stream);
  if (operation.is_inline()) {
    request.was_refused_inline = true;
    requests_.SetState(request, v1::REQUEST_STATE_QUEUED);
  }
  request.operation_id.clear();
  queue_.Add(request.stream(), request.arrived.client, request.bytes);
  if (HasPlan(request)) queue_.SetNeeds(request.stream(), NeedsOf(request));
}

void Coordinator::Impl::ConcludePreparation(Operation& operation) {
  Request& request = *requests_.Find(*operation.stream);
  const StreamId stream = request.stream();
  request.accepted_at = request.run_at = request.download_at = batch_.now();
  FinishRequest::Prepared prepared{*request.arrived.prepare_ttl, 0, operation.found};
  std::vector<ConnectionId> members;
  for (const Operation::Member& member : operation.members) {
    prepared.bytes += member.bytes;
    members.push_back(member.connection);
  }
  prepared_places_.Note(request.arrived.principal, request.arrived.recipe_fingerprint,
                        std::move(members), batch_.now() + prepared.ttl);
  InformClient(request, operation);
  BeginDownload begin;
  begin.stream = stream;
  begin.queue_time = request.accepted_at - request.arrived_at;
  batch_.Emit(std::move(begin));
  order_.Finish(stream, request.planning_seconds);
  requests_.Succeed(request, {.prepared = prepared});
  operations_.Close(operation);
  operations_.EraseIfReleased(operation);
}

void Coordinator::Impl::Accept(Operation& operation) {
  Request& request = *requests_.Find(*operation.stream);
  request.accepted_at = batch_.now();
  InformClient(request, operation);
  requests_.SetState(request, v1::REQUEST_STATE_UPLOADING);
  operations_.Accept(operation);
}

void Coordinator::Impl::InformClient(Request& request, const Operation& operation) {
  request.generation = ring_.generation();

  std::vector<int64_t> workspace_bytes;
  for (const Operation::Member& member : operation.members) {
    workspace_bytes.push_back(member.workspace_bytes);
  }
  // Equal requests share their plan, and mostly what their members added to it.
  if (accepted_plan_.planned != request.plan ||
      accepted_plan_.accepted->workspace_bytes != workspace_bytes) {
    Plan plan = *request.plan;
    plan.workspace_bytes = std::move(workspace_bytes);
    accepted_plan_ = {request.plan, std::make_shared<const Plan>(std::move(plan))};
  }
  request.plan = accepted_plan_.accepted;

  AcceptRequest accept;
  accept.stream = request.stream();
  accept.request_id = request.arrived.request_id;
  accept.operation_id = operation.id;
  accept.generation = ring_.generation();
  accept.plan = request.plan;
  accept.transport = request.transport.transport;
  accept.transport_reason = request.transport.reason;
  accept.is_inline = operation.is_inline() || operation.is_only_prepared();
  if (!request.retains()) request.spec.reset();  // not needed any more
  for (const Operation::Member& member : operation.members) {
    const v1::Register& registration = roster_.at(member.connection).registration;
    RingMember& member_info = accept.members.emplace_back(
        RingMember{member.connection, registration.name(), registration.data_address()});
    if (accept.transport == v1::TRANSPORT_DIRECT) {
      member_info.client_data_address = registration.client_data_address();
      member_info.token = TokenOf(request, static_cast<int>(accept.members.size()) - 1);
    }
    request.member_names.push_back(registration.name());
  }
  batch_.Emit(std::move(accept));
}

}  // namespace ringattn::server

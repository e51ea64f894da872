// Coordinator: admission of requests, from the queue to the members' reservations.
#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/host_figures.h"
#include "common/security/token.h"
#include "common/wire/durations.h"
#include "server/core/coordinator_impl.h"
#include "server/core/requests/client_failures.h"
#include "server/core/requests/placement.h"
#include "server/core/requests/reserve_message.h"
#include "server/core/requests/worker_capabilities.h"
#include "server/core/ring/rank_order.h"

namespace ringattn::server {
namespace {

// Per event: Reserve lists the documents for every member on the core's thread, at about 20 ns
// each, 3 ms in total.
constexpr int64_t kMaxDocumentsPerEvent = int64_t{1} << 17;

// Members are chosen before ranks, so each must have room for the largest buffers.
int64_t LargestBuffers(const Plan& plan) {
  return *std::max_element(plan.buffer_bytes.begin(), plan.buffer_bytes.end());
}

// Returns the rate of the worker's fastest kernels; 0: not measured.
double FastestRate(const v1::Register& registration) {
  double fastest = 0;
  for (const v1::KernelRate& rate : registration.kernel_rates()) {
    fastest = std::max(fastest, rate.flops_per_second());
  }
  return fastest;
}

// Marks the sites of hosts whose slowest worker computes at less than half the rate of the fastest
// host's slowest worker.
void MarkSlowHosts(const std::vector<ConnectionId>& members, const Roster& roster,
                   std::vector<Site>* sites) {
  if (sites->empty() || sites->back().host == 0) return;  // one host
  std::map<int, double> rates;
  for (size_t rank = 0; rank < sites->size(); ++rank) {
    const double rate = FastestRate(roster.at(members[rank]).registration);
    const auto [host, is_new] = rates.emplace((*sites)[rank].host, rate);
    if (!is_new) host->second = std::min(host->second, rate);
  }
  double fastest = 0;
  for (const auto& [host, rate] : rates) fastest = std::max(fastest, rate);
  for (Site& site : *sites) {
    const double rate = rates.at(site.host);
    site.on_slow_host = rate > 0 && rate < kSlowHostRatio * fastest;
  }
}

}  // namespace

// Admits queued requests in order, as many as fit. A request that waits for memory blocks the
// requests after it, so that small requests cannot starve a large one. After a request that waits
// for a slot, only requests that take an express slot are admitted.
void Coordinator::Impl::AdmitQueued() {
  if (!ring_.ready() || suspicion_.open() || ring_.HoldsAdmission() || queue_.empty()) return;
  int64_t documents = 0;  // listed by the Reserve messages of this event
  bool only_express = false;
  std::vector<Site> sites;  // empty: to be computed again
  for (StreamId stream : Admissible()) {
    Request* const found = requests_.Find(stream);
    if (found == nullptr) continue;  // ended because its residual was evicted
    Request& request = *found;
    if (request.blocked_until_release > operations_.releases()) return;
    if (operations_.OneReservesAlone()) return;
    if (request.reserves_alone && operations_.OthersReserve(nullptr)) return;
    const Residual* residual = residuals_.Find(request.arrived.residual);
    if (residual != nullptr && !IsInRing(*residual)) {
      LoseResidual(residual->handle);
      continue;
    }
    if (sites.empty()) sites = Sites();
    Placement placement = PlaceRequest(request, &sites, only_express);
    if (placement.result == Placement::Result::kWaitsForMemory && MakeRoomFor(request)) {
      sites = Sites();
      placement = PlaceRequest(request, &sites, only_express);
    }
    switch (placement.result) {
      case Placement::Result::kWaitsForMemory:
        return;
      case Placement::Result::kWaitsForSlots:
        only_express = true;
        break;
      case Placement::Result::kNeverFits: {
        if (request.plan->may_grow) {  // the workers of further hosts each need less memory
          PlanForMoreWorkers(request);
          break;
        }
        if (request.retains()) {
          StopRetaining(request, "no worker has the memory to keep the inputs as they are");
          break;
        }
        if (residual != nullptr) {  // without the residual, the tensors may fit
          LoseResidual(residual->handle);
          break;
        }
        const ConnectionId on = ring_.members()[placement.roomiest_rank];
        EndRequest(stream,
                   NeverFits(placement.roomiest_rank, roster_.NameOf(on),
                             LargestBuffers(*request.plan), request.WorkspaceOn(on),
                             roster_.at(on).registration.memory_bytes(), kv_caches_.BytesOn(on)));
        break;
      }
      case Placement::Result::kPlaced:
        if (request.arrived.prepare_ttl) {
          request.transport.transport = v1::TRANSPORT_UNSPECIFIED;
        } else if (std::optional<Failure> why = ChooseTransport(request, placement)) {
          EndRequest(stream, *why);
          break;
        }
        documents += request.spec->shape.num_documents() * placement.ranks.size();
        StartOperation(request, placement);
        sites.clear();
        // The next event continues, so that heartbeats wait no longer than this.
        if (documents > kMaxDocumentsPerEvent) return;
        break;
    }
  }
}

// Asks for a plan with more workers than the one that does not fit.
void Coordinator::Impl::PlanForMoreWorkers(Request& request) {
  request.min_world_size = request.plan->shards.world_size + 1;
  request.plan = nullptr;
  AskForPlan(request);
}

// Returns the queued requests with a plan for this ring, in order of service.
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
  const std::vector<int> hosts = HostsOf(ring_.members(), roster_);
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const ConnectionId member = ring_.members()[rank];
    sites.push_back(operations_.SiteOf(member));
    sites.back().host = hosts[rank];
    sites.back().memory_bytes = roster_.at(member).registration.memory_bytes();
    const auto kept = residuals_.bytes_by_worker().find(member);
    if (kept != residuals_.bytes_by_worker().end()) sites.back().reserved_bytes += kept->second;
    // A cache stays for as long as its client wants. A request that would have to wait for it fails
    // instead, so that it does not block the queue.
    if (sites.back().memory_bytes > 0) {
      sites.back().memory_bytes =
          std::max<int64_t>(1, sites.back().memory_bytes - kv_caches_.BytesOn(member));
    }
    sites.back().serves_steps = kv_caches_.HasWriterOn(member);
  }
  MarkSlowHosts(ring_.members(), roster_, &sites);
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
                            !CheckServedBy(registration, *request.spec, choice).has_value();
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
  if (std::optional<Placement> prepared =
          PlaceWherePrepared(request, wanted, *sites, only_express)) {
    return *prepared;
  }
  Placement placement = Place(
      *sites, wanted, {config_.max_operations_per_worker, config_.express_operations_per_worker()},
      only_express);
  const std::vector<std::string>& named = request.arrived.choice.members;
  if (placement.result != Placement::Result::kPlaced || named.empty()) return placement;
  // Only the named members may serve it; the client chose their order.
  placement.ranks.clear();
  for (const std::string& name : named) placement.ranks.push_back(*RankOf(name));
  return placement;
}

// Another member that is less occupied for a moment would have to prepare the request, so these
// come first unless a run there would delay it. A preparation waits for no run.
std::optional<Placement> Coordinator::Impl::PlaceWherePrepared(const Request& request,
                                                               const PlacementRequest& wanted,
                                                               const std::vector<Site>& all,
                                                               bool only_express) const {
  if (!request.arrived.choice.members.empty()) return std::nullopt;  // the client's choice
  const std::vector<ConnectionId>* const members = prepared_places_.Find(
      request.arrived.principal, request.arrived.recipe_fingerprint, batch_.now());
  if (members == nullptr || static_cast<int>(members->size()) != wanted.count) return std::nullopt;
  std::vector<Site> sites = all;
  for (size_t rank = 0; rank < sites.size(); ++rank) {
    const ConnectionId member = ring_.members()[rank];
    if (std::find(members->begin(), members->end(), member) == members->end()) {
      sites[rank].serves = false;
    } else if (sites[rank].computes && !request.arrived.prepare_ttl) {
      return std::nullopt;
    }
  }
  Placement placement = Place(
      sites, wanted, {config_.max_operations_per_worker, config_.express_operations_per_worker()},
      only_express);
  if (placement.result != Placement::Result::kPlaced) return std::nullopt;
  return placement;
}

// Returns the failure if the request requires a transport that is unavailable.
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
  if (!operations_.Start(std::move(order))) return;
  request.accepted_at = request.run_at = batch_.now();
  requests_.SetState(request, v1::REQUEST_STATE_COMPUTING);
}

// Returns whether all tensors of the request fit into control messages.
bool Coordinator::Impl::MayBeInline(const Request& request, const Operations::Order& order) const {
  if (request.arrived.inline_inputs == nullptr || request.arrived.prepare_ttl) return false;
  if (request.was_refused_inline || request.reserves_alone) return false;
  if (order.members.size() != 1 || request.transport.transport != v1::TRANSPORT_RELAY) return false;
  if (!roster_.at(order.members[0]).registration.runs_inline()) return false;
  // A residual lives longer than its operation. A worker decodes many documents in the background.
  if (request.retains() || !order.residual.empty() || request.many_documents) return false;
  int64_t output_bytes = 0;
  for (TensorId id : OutputsOf(*request.spec, request.arrived.direction)) {
    output_bytes += BytesOf(*request.spec, id);
  }
  return std::max(request.bytes, output_bytes) <= kMaxInlineRunBytes;
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

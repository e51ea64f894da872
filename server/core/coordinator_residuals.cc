// Coordinator: residuals, from the Forward's request for one to its end.
#include <algorithm>
#include <utility>

#include "server/core/coordinator_impl.h"
#include "server/core/requests/client_failures.h"

namespace ringattn::server {
namespace {

// Returns a choice that reproduces the Forward's plan, because the shards already have their
// places.
PlanChoice SamePlan(const Plan& plan) {
  PlanChoice choice;
  choice.layout = plan.recipe.layout;
  choice.schedule = plan.recipe.schedule;
  choice.world_size = plan.shards.world_size;
  choice.stripe = plan.recipe.stripe;
  choice.heads_per_step = plan.recipe.heads_per_step;
  choice.group_size = plan.recipe.group_size;
  return choice;
}

}  // namespace

ResidualView Coordinator::Impl::FindResidual(const std::string& handle,
                                             const std::string& principal,
                                             const std::string& request_id) const {
  ResidualView view;
  view.failure = residuals_.CheckReadable(handle, principal, request_id);
  if (view.failure) return view;
  const Residual& residual = *residuals_.Find(handle);
  view.spec = residual.spec;
  view.choice = SamePlan(*residual.plan);
  for (const ResidualMember& member : residual.members) {
    // A residual ends with the first worker that is lost.
    if (roster_.Has(member.connection)) view.members.push_back(roster_.NameOf(member.connection));
  }
  return view;
}

void Coordinator::Impl::On(const ResidualDeleted& event) {
  residuals_.Delete(event.handle, event.principal, operations_.ResidualsInUse());
}

void Coordinator::Impl::On(const ResidualsRenewed& event) {
  for (const std::string& handle : event.handles) {
    residuals_.Renew(handle, event.principal, event.ttl);
  }
}

// --------------------------------------------------------------------- keeping

// Called at the end of the Forward, so that results of a failed Forward are never kept.
Coordinator::Impl::KeptResidual Coordinator::Impl::KeepResidual(const Request& request,
                                                                const Operation& operation) {
  if (!request.retains()) return {"", request.not_retained};
  Residual residual;
  residual.handle = request.arrived.retain->handle;
  residual.ttl = request.arrived.retain->ttl;
  residual.principal = request.arrived.principal;
  residual.client = request.arrived.client;
  residual.operation_id = operation.id;
  residual.spec = request.spec;
  residual.plan = request.plan;
  residual.fingerprint = request.arrived.recipe_fingerprint;
  for (const Operation::Member& member : operation.members) {
    residual.members.push_back({member.connection, member.residual_bytes});
  }
  const std::string handle = residual.handle;
  std::string why_not = residuals_.Keep(
      std::move(residual), request.arrived.terms.max_residual_bytes, operations_.ResidualsInUse());
  if (!why_not.empty()) return {"", std::move(why_not)};
  return {handle, ""};
}

// The Forward continues without a residual, because keeping its inputs needs one more K/V buffer.
void Coordinator::Impl::StopRetaining(Request& request, std::string why) {
  request.arrived.retain.reset();
  request.not_retained = std::move(why);
  residuals_.CountRefusal();
  StopPlanning(request);
  request.plan = nullptr;
  request.workspace_bytes.clear();
  AskForPlan(request);
}

// --------------------------------------------------------------------- reading

// Places the request on the members that hold the residual, by their ring rank. The residual's
// bytes do not count as memory held by others.
Placement Coordinator::Impl::PlaceReader(const Residual& residual, const PlacementRequest& wanted,
                                         std::vector<Site> sites, bool only_express) const {
  for (size_t rank = 0; rank < sites.size(); ++rank) {
    const auto member =
        std::find_if(residual.members.begin(), residual.members.end(),
                     [&](const auto& each) { return each.connection == ring_.members()[rank]; });
    sites[rank].serves &= member != residual.members.end();
    if (member != residual.members.end()) sites[rank].reserved_bytes -= member->bytes;
  }
  Placement placement = Place(sites, wanted, SlotsPerMember(), only_express);
  if (placement.result != Placement::Result::kPlaced) return placement;
  placement.ranks.clear();
  for (const ResidualMember& member : residual.members) {
    placement.ranks.push_back(*ring_.RankOf(member.connection));
  }
  return placement;
}

bool Coordinator::Impl::IsInRing(const Residual& residual) const {
  return std::all_of(
      residual.members.begin(), residual.members.end(),
      [&](const ResidualMember& member) { return ring_.RankOf(member.connection).has_value(); });
}

// -------------------------------------------------------------------- endings

void Coordinator::Impl::EndReaders(const std::vector<StreamId>& readers, ResidualEnd why) {
  for (StreamId stream : readers) EndRequest(stream, ResidualEnded(why));
}

void Coordinator::Impl::LoseResidual(const std::string& handle) {
  EndReaders(residuals_.Lose(handle), ResidualEnd::kLost);
}

// Evicts residuals until the request fits, since queued requests take precedence over kept state.
// Consumed residuals are evicted at once, others only if the request would not fit on idle workers;
// a short wait is cheaper than a lost residual. Returns true if any was evicted.
bool Coordinator::Impl::MakeRoomFor(const Request& request) {
  if (residuals_.counts().residuals == 0) return false;
  std::vector<Site> sites = Sites();
  std::vector<Site> idle_sites = sites;
  for (size_t rank = 0; rank < idle_sites.size(); ++rank) {
    const auto kept = residuals_.bytes_by_worker().find(ring_.members()[rank]);
    idle_sites[rank].reserved_bytes = kept == residuals_.bytes_by_worker().end() ? 0 : kept->second;
  }
  const auto waits = [&](std::vector<Site>* on) {
    return PlaceRequest(request, on, false).result == Placement::Result::kWaitsForMemory;
  };
  // Called at every event while the request waits, so the common answer must be cheap.
  if (residuals_.consumed() == 0 && !waits(&idle_sites)) return false;
  bool made_room = false;
  for (const std::string& handle : residuals_.EvictionOrder(operations_.ResidualsInUse())) {
    if (!waits(&sites)) break;
    if (handle == request.arrived.residual) continue;
    const Residual& residual = *residuals_.Find(handle);
    if (!residual.consumed && !waits(&idle_sites)) break;
    for (const ResidualMember& member : residual.members) {
      const std::optional<int> rank = ring_.RankOf(member.connection);
      if (!rank) continue;
      sites[*rank].reserved_bytes -= member.bytes;
      idle_sites[*rank].reserved_bytes -= member.bytes;
    }
    const bool was_consumed = residual.consumed;
    EndReaders(residuals_.Evict(handle),
               was_consumed ? ResidualEnd::kConsumed : ResidualEnd::kEvicted);
    made_room = true;
  }
  return made_room;
}

// The worker has less memory than it announced, or its memory is fragmented.
bool Coordinator::Impl::EvictOneOn(ConnectionId connection, const std::string& except) {
  for (const std::string& handle : residuals_.EvictionOrder(operations_.ResidualsInUse())) {
    if (handle == except || !residuals_.Find(handle)->IsOn(connection)) continue;
    EndReaders(residuals_.Evict(handle), ResidualEnd::kEvicted);
    return true;
  }
  return false;
}

std::map<ConnectionId, int64_t> Coordinator::Impl::ReservedByWorker() const {
  std::map<ConnectionId, int64_t> reserved = operations_.ReservedByWorker();
  for (const auto& [connection, bytes] : residuals_.bytes_by_worker()) {
    reserved[connection] += bytes;
  }
  for (const auto& [connection, bytes] : kv_caches_.bytes_by_worker()) {
    reserved[connection] += bytes;
  }
  return reserved;
}

}  // namespace ringattn::server

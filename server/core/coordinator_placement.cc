// Coordinator: the members for a request.
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/plan/host_figures.h"
#include "server/core/coordinator_impl.h"
#include "server/core/requests/placement.h"
#include "server/core/requests/plan_summary.h"
#include "server/core/ring/rank_order.h"

namespace ringattn::server {
namespace {

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

SlotLimits Coordinator::Impl::SlotsPerMember() const {
  return {config_.max_operations_per_worker, config_.express_operations_per_worker()};
}

QueueNeeds Coordinator::Impl::NeedsOf(const Request& request) const {
  QueueNeeds needs;
  needs.cost_seconds = order_.CostOf(request.stream());
  needs.memory_bytes = LargestBuffers(*request.plan);
  int64_t workspace_bytes = 0;
  for (const auto& [connection, bytes] : request.workspace_bytes) {
    workspace_bytes = std::max(workspace_bytes, bytes);
  }
  needs.memory_bytes += workspace_bytes;
  needs.is_special = !request.arrived.residual.empty() || request.blocked_until_release > 0 ||
                     request.reserves_alone;
  return needs;
}

std::vector<Site> Coordinator::Impl::Sites() const {
  std::vector<Site> sites = operations_.SitesOf(ring_.members());
  const std::vector<int> hosts = HostsOf(ring_.members(), roster_);
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const ConnectionId member = ring_.members()[rank];
    Site& site = sites[rank];
    site.host = hosts[rank];
    site.memory_bytes = roster_.at(member).registration.memory_bytes();
    const auto kept = residuals_.bytes_by_worker().find(member);
    if (kept != residuals_.bytes_by_worker().end()) site.reserved_bytes += kept->second;
    // A cache stays for as long as its client wants. A request that would have to wait for it fails
    // instead, so that it does not block the queue.
    if (site.memory_bytes > 0) {
      site.memory_bytes = std::max<int64_t>(1, site.memory_bytes - kv_caches_.BytesOn(member));
    }
    site.serves_steps = kv_caches_.HasWriterOn(member);
  }
  MarkSlowHosts(ring_.members(), roster_, &sites);
  return sites;
}

Placement Coordinator::Impl::PlaceRequest(const Request& request, std::vector<Site>* sites,
                                          bool only_express) const {
  for (size_t rank = 0; rank < sites->size(); ++rank) {
    const ConnectionId member = ring_.members()[rank];
    (*sites)[rank].workspace_bytes = request.WorkspaceOn(member);
    (*sites)[rank].serves = request.serving_ranks.at(rank);
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
  Placement placement = Place(*sites, wanted, SlotsPerMember(), only_express);
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
  Placement placement = Place(sites, wanted, SlotsPerMember(), only_express);
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

}  // namespace ringattn::server

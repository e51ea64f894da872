#include "server/core/requests/placement.h"

#include <algorithm>
#include <cassert>
#include <compare>
#include <functional>
#include <limits>

namespace ringattn::server {
namespace {

// A request delays another by at most an eighth if it costs at most an eighth of it.
constexpr double kExpressCostRatio = 8;

int64_t RoomOf(const Site& site) { return site.memory_bytes - site.workspace_bytes; }

bool CouldHold(const Site& site, int64_t bytes) {
  return site.serves && (site.memory_bytes == 0 || RoomOf(site) >= bytes);
}

bool HasMemory(const Site& site, int64_t bytes) {
  return site.memory_bytes == 0 || site.reserved_bytes <= RoomOf(site) - bytes;
}

bool HasCommonSlot(const Site& site, const SlotLimits& limits) {
  return site.operations - site.express_operations < limits.all - limits.express;
}

// `client` is null for any client.
bool HasExpressSlot(const Site& site, const std::string* client, double cost_seconds,
                    const SlotLimits& limits) {
  if (site.express_operations >= limits.express) return false;
  if (client != nullptr && site.express_clients.count(*client) > 0) return false;
  if (cost_seconds * kExpressCostRatio <= site.largest_cost) return true;
  return !site.computes && (client == nullptr || site.clients.count(*client) == 0);
}

// Sites sort by what delays a new operation there.
struct Occupancy {
  bool serves_steps = false;
  int operations = 0;
  bool on_slow_host = false;
  int spare_members = 0;  // of the host
  int64_t bytes = 0;
  int rank = 0;

  auto operator<=>(const Occupancy&) const = default;
};

// A host's sites.
struct HostSites {
  int could_hold = 0;                // sites that could ever hold the request
  std::vector<Occupancy> available;  // acceptable sites, the least occupied first
};

using SiteRule = std::function<bool(const Site&)>;

std::vector<HostSites> SitesByHost(const std::vector<Site>& sites, const SiteRule& could_hold,
                                   const SiteRule& may_take) {
  std::vector<HostSites> hosts;
  for (int rank = 0; rank < static_cast<int>(sites.size()); ++rank) {
    const Site& site = sites[rank];
    if (static_cast<int>(hosts.size()) <= site.host) hosts.resize(site.host + 1);
    HostSites& host = hosts[site.host];
    host.could_hold += could_hold(site);
    if (!may_take(site)) continue;
    host.available.push_back({.serves_steps = site.serves_steps,
                              .operations = site.operations,
                              .on_slow_host = site.on_slow_host,
                              .bytes = site.reserved_bytes,
                              .rank = rank});
  }
  for (HostSites& host : hosts) std::sort(host.available.begin(), host.available.end());
  return hosts;
}

// Returns the fewest hosts whose sites could together hold `count` members. REQUIRES: all together
// could.
int FewestHosts(const std::vector<HostSites>& hosts, int count) {
  std::vector<int> sizes;
  for (const HostSites& host : hosts) sizes.push_back(host.could_hold);
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  int fewest = 0;
  for (; count > 0; ++fewest) count -= sizes[fewest];
  return fewest;
}

// Returns the occupancy of the busiest of the `count` sites that the host would contribute.
Occupancy BusiestOf(const HostSites& host, int count) {
  Occupancy busiest = host.available[count - 1];
  if (count > 1) busiest.spare_members = host.could_hold - count;
  return busiest;
}

// Returns the ranks of the least occupied acceptable sites on the fewest hosts that could hold the
// request; fewer than `count` if there are not enough now.
std::vector<int> Idlest(const std::vector<Site>& sites, int count, const SiteRule& could_hold,
                        const SiteRule& may_take) {
  std::vector<HostSites> hosts = SitesByHost(sites, could_hold, may_take);
  const int fewest = FewestHosts(hosts, count);
  // A host contributes all that it can, so that as few hosts as possible take part.
  const auto share = [count](const HostSites& host) {
    return std::min(count, static_cast<int>(host.available.size()));
  };
  std::stable_sort(hosts.begin(), hosts.end(), [&](const HostSites& a, const HostSites& b) {
    if (share(a) != share(b)) return share(a) > share(b);
    return share(a) > 0 && BusiestOf(a, share(a)) < BusiestOf(b, share(b));
  });
  std::vector<int> ranks;
  for (int i = 0; i < fewest; ++i) {
    for (const Occupancy& site : hosts[i].available) {
      if (static_cast<int>(ranks.size()) < count) ranks.push_back(site.rank);
    }
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace

Placement Place(const std::vector<Site>& sites, const PlacementRequest& request,
                const SlotLimits& limits, bool only_express) {
  const int count = request.count;
  const int64_t bytes = request.buffer_bytes;
  assert(count >= 1 && count <= static_cast<int>(sites.size()));
  Placement placement;
  int could_hold = 0;
  for (const Site& site : sites) {
    if (RoomOf(site) > RoomOf(sites[placement.roomiest_rank])) {
      placement.roomiest_rank = static_cast<int>(&site - sites.data());
    }
    could_hold += CouldHold(site, bytes);
  }
  if (could_hold < count) {
    placement.result = Placement::Result::kNeverFits;
    return placement;
  }
  const SiteRule could = [bytes](const Site& site) { return CouldHold(site, bytes); };
  const auto has_memory = [bytes](const Site& site) {
    return CouldHold(site, bytes) && HasMemory(site, bytes);
  };
  if (static_cast<int>(Idlest(sites, count, could, has_memory).size()) < count) return placement;
  for (const bool express : {false, true}) {
    if (only_express && !express) continue;
    placement.ranks = Idlest(sites, count, could, [&](const Site& site) {
      return has_memory(site) &&
             (express ? !request.many_documents &&
                            HasExpressSlot(site, &request.client, request.cost_seconds, limits)
                      : HasCommonSlot(site, limits));
    });
    if (static_cast<int>(placement.ranks.size()) < count) continue;
    placement.result = Placement::Result::kPlaced;
    placement.is_express = express;
    return placement;
  }
  placement.ranks.clear();
  placement.result = Placement::Result::kWaitsForSlots;
  return placement;
}

bool HasCommonSlot(const std::vector<Site>& sites, const SlotLimits& limits) {
  return std::any_of(sites.begin(), sites.end(),
                     [&](const Site& site) { return HasCommonSlot(site, limits); });
}

bool MightTakeExpress(const std::vector<Site>& sites, const std::string* client,
                      double cost_seconds, const SlotLimits& limits) {
  return std::any_of(sites.begin(), sites.end(), [&](const Site& site) {
    return HasExpressSlot(site, client, cost_seconds, limits);
  });
}

LeastMemory LeastBytes(const std::vector<Site>& sites) {
  constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();
  LeastMemory least{kUnknown, kUnknown};
  for (const Site& site : sites) {
    if (site.memory_bytes == 0) continue;
    least.free = std::min(least.free, site.memory_bytes - site.reserved_bytes);
    least.total = std::min(least.total, site.memory_bytes);
  }
  return least;
}

}  // namespace ringattn::server

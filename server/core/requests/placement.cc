#include "server/core/requests/placement.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <limits>
#include <tuple>

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

bool HasExpressSlot(const Site& site, const PlacementRequest& request, const SlotLimits& limits) {
  if (request.many_documents || site.express_operations >= limits.express) return false;
  if (site.express_clients.count(request.client) > 0) return false;
  if (request.cost_seconds * kExpressCostRatio <= site.largest_cost) return true;
  return !site.computes && site.clients.count(request.client) == 0;
}

// Returns the least occupied acceptable sites; fewer than `count` if there are not enough.
std::vector<int> Idlest(const std::vector<Site>& sites, int count,
                        const std::function<bool(const Site&)>& may_take) {
  std::vector<std::tuple<bool, int, int64_t, int>> idlest;
  for (int rank = 0; rank < static_cast<int>(sites.size()); ++rank) {
    const Site& site = sites[rank];
    if (may_take(site)) {
      idlest.emplace_back(site.serves_steps, site.operations, site.reserved_bytes, rank);
    }
  }
  std::sort(idlest.begin(), idlest.end());
  std::vector<int> ranks;
  for (const auto& [serves_steps, operations, bytes, rank] : idlest) {
    if (static_cast<int>(ranks.size()) < count) ranks.push_back(rank);
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
  int could_hold = 0, have_memory = 0;
  for (const Site& site : sites) {
    if (RoomOf(site) > RoomOf(sites[placement.roomiest_rank])) {
      placement.roomiest_rank = static_cast<int>(&site - sites.data());
    }
    could_hold += CouldHold(site, bytes);
    have_memory += CouldHold(site, bytes) && HasMemory(site, bytes);
  }
  if (could_hold < count) {
    placement.result = Placement::Result::kNeverFits;
    return placement;
  }
  if (have_memory < count) return placement;
  for (const bool express : {false, true}) {
    if (only_express && !express) continue;
    placement.ranks = Idlest(sites, count, [&](const Site& site) {
      return CouldHold(site, bytes) && HasMemory(site, bytes) &&
             (express ? HasExpressSlot(site, request, limits) : HasCommonSlot(site, limits));
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

}  // namespace ringattn::server

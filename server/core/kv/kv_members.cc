#include "server/core/kv/kv_members.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "server/core/kv/kv_failures.h"

namespace ringattn::server {
namespace {

int64_t BytesOnEachWorker(const KvCacheSpec& spec, int world_size) {
  const KvPlacement placement = PlaceKvCache(spec, world_size);
  int64_t bytes = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    bytes = std::max(bytes, KvBytesOfRank(spec, placement, rank));
  }
  return bytes;
}

KvReservation ReservationOn(const KvCacheSpec& spec, const std::vector<KvSite>& sites) {
  const int world_size = static_cast<int>(sites.size());
  KvReservation reservation;
  reservation.placement = PlaceKvCache(spec, world_size);
  reservation.bytes_per_worker = BytesOnEachWorker(spec, world_size);
  for (const KvSite& site : sites) reservation.members.emplace_back(site.connection, site.worker);
  return reservation;
}

// The failure of a cache for which too few of the sites have room.
Failure NoRoom(const KvCacheSpec& spec, int world_size, const std::vector<KvSite>& sites,
               absl::Duration retry_after) {
  const int64_t bytes = BytesOnEachWorker(spec, world_size);
  int could = 0;
  int64_t largest = 0;
  for (const KvSite& site : sites) {
    could += static_cast<int>(site.MaxRoom() >= bytes);
    largest = std::max(largest, site.MaxRoom());
  }
  if (could < world_size) return KvNeverFits(bytes, world_size, largest);
  return KvMemory(bytes, world_size, retry_after);
}

std::variant<KvReservation, Failure> TakeNamed(const KvCacheSpec& spec,
                                               const KvMembersRequest& request,
                                               const std::vector<KvSite>& sites) {
  std::vector<KvSite> chosen;
  for (const std::string& name : request.members) {
    const auto found = std::find_if(sites.begin(), sites.end(),
                                    [&](const KvSite& site) { return site.worker == name; });
    if (found == sites.end()) return KvMemberMissing(name);
    chosen.push_back(*found);
  }
  const int world_size = static_cast<int>(chosen.size());
  const int64_t bytes = BytesOnEachWorker(spec, world_size);
  const bool fits = std::all_of(chosen.begin(), chosen.end(),
                                [&](const KvSite& site) { return site.Room() >= bytes; });
  if (!fits) return NoRoom(spec, world_size, chosen, request.retry_after);
  return ReservationOn(spec, chosen);
}

// Nothing if fewer than `world_size` of the sites, which are in order of preference, have room.
std::optional<KvReservation> TakeRoomiest(const KvCacheSpec& spec, int world_size,
                                          const std::vector<KvSite>& sites) {
  const int64_t bytes = BytesOnEachWorker(spec, world_size);
  std::vector<KvSite> chosen;
  for (const KvSite& site : sites) {
    if (static_cast<int>(chosen.size()) < world_size && site.Room() >= bytes) {
      chosen.push_back(site);
    }
  }
  if (static_cast<int>(chosen.size()) < world_size) return std::nullopt;
  std::sort(chosen.begin(), chosen.end(),
            [](const KvSite& a, const KvSite& b) { return a.connection < b.connection; });
  return ReservationOn(spec, chosen);
}

}  // namespace

int64_t KvSite::MaxRoom() const {
  return memory_bytes == 0 ? max_kv_cache_bytes : std::min(max_kv_cache_bytes, memory_bytes);
}

int64_t KvSite::Room() const {
  const int64_t within_limit = max_kv_cache_bytes - kv_cache_bytes;
  if (memory_bytes == 0) return within_limit;
  return std::min(within_limit, memory_bytes - kv_cache_bytes - request_bytes);
}

int64_t KvSite::RoomBesideResiduals() const {
  const int64_t room = Room();
  if (memory_bytes == 0) return room;
  return std::min(room, memory_bytes - kv_cache_bytes - request_bytes - residual_bytes);
}

std::variant<KvReservation, Failure> ChooseKvMembers(const KvCacheSpec& spec,
                                                     const KvMembersRequest& request,
                                                     std::vector<KvSite> sites) {
  if (!request.members.empty()) return TakeNamed(spec, request, sites);
  std::sort(sites.begin(), sites.end(), [](const KvSite& a, const KvSite& b) {
    return std::make_tuple(-a.RoomBesideResiduals(), -a.Room(), a.connection) <
           std::make_tuple(-b.RoomBesideResiduals(), -b.Room(), b.connection);
  });
  const int most = std::min(static_cast<int>(sites.size()), request.max_world_size);
  const int fewest = request.world_size.value_or(1);
  if (fewest > most) return KvWorkersMissing(fewest, most, request.retry_after);
  if (request.world_size) {
    if (auto taken = TakeRoomiest(spec, fewest, sites)) return *std::move(taken);
    return NoRoom(spec, fewest, sites, request.retry_after);
  }
  int largest = 1;
  for (int world_size = 1; world_size <= most; ++world_size) {
    if (PlaceKvCache(spec, world_size).position_parts > 1) continue;
    if (auto taken = TakeRoomiest(spec, world_size, sites)) return *std::move(taken);
    largest = world_size;
  }
  return NoRoom(spec, largest, sites, request.retry_after);
}

}  // namespace ringattn::server

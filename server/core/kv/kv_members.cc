#include "server/core/kv/kv_members.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/core/kv/kv_failures.h"

namespace ringattn::server {
namespace {

// A cache on so many workers. `spec` has the blocks of one part.
struct Division {
  KvPlacement placement;
  KvCacheSpec spec;

  int64_t BytesOnEachWorker() const {
    int64_t bytes = 0;
    for (int rank = 0; rank < placement.world_size(); ++rank) {
      bytes = std::max(bytes, KvBytesOfRank(spec, placement, rank));
    }
    return bytes;
  }
};

// Nothing if position parts cannot divide the blocks as the request wants.
std::optional<Division> Divide(const KvCacheSpec& spec, const KvMembersRequest& request,
                               int world_size) {
  Division division{PlaceKvCache(spec, world_size), spec};
  if (request.divide_blocks) {
    division.spec.block_tokens = DividedBlockTokens(spec, division.placement);
    if (division.spec.block_tokens == 0) return std::nullopt;
  }
  return division;
}

KvReservation ReservationOn(const Division& division, const std::vector<KvSite>& sites,
                            std::string reason) {
  KvReservation reservation;
  reservation.placement = division.placement;
  reservation.bytes_per_worker = division.BytesOnEachWorker();
  reservation.block_tokens = division.spec.block_tokens;
  reservation.reason = std::move(reason);
  for (const KvSite& site : sites) reservation.members.emplace_back(site.connection, site.worker);
  return reservation;
}

// The failure of a cache for which too few of the sites have room.
Failure NoRoom(const Division& division, const std::vector<KvSite>& sites,
               absl::Duration retry_after) {
  const int world_size = division.placement.world_size();
  const int64_t bytes = division.BytesOnEachWorker();
  int could = 0;
  int64_t largest = 0;
  for (const KvSite& site : sites) {
    could += static_cast<int>(site.MaxRoom() >= bytes);
    largest = std::max(largest, site.MaxRoom());
  }
  if (could < world_size) return KvNeverFits(bytes, world_size, largest);
  return KvMemory(bytes, world_size, retry_after);
}

Failure Indivisible(const KvCacheSpec& spec, int world_size) {
  return KvBlocksIndivisible(spec.block_tokens, PlaceKvCache(spec, world_size).position_parts);
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
  const auto division = Divide(spec, request, static_cast<int>(chosen.size()));
  if (!division) return Indivisible(spec, static_cast<int>(chosen.size()));
  const int64_t bytes = division->BytesOnEachWorker();
  const bool fits = std::all_of(chosen.begin(), chosen.end(),
                                [&](const KvSite& site) { return site.Room() >= bytes; });
  if (!fits) return NoRoom(*division, chosen, request.retry_after);
  return ReservationOn(*division, chosen, "the request names the members");
}

// The first sites that have room, in order of connections. Nothing if there are fewer than the
// division needs. `sites` are in order of preference.
std::optional<std::vector<KvSite>> TakeRoomiest(const Division& division,
                                                const std::vector<KvSite>& sites) {
  const auto world_size = static_cast<size_t>(division.placement.world_size());
  const int64_t bytes = division.BytesOnEachWorker();
  std::vector<KvSite> chosen;
  for (const KvSite& site : sites) {
    if (chosen.size() < world_size && site.Room() >= bytes) chosen.push_back(site);
  }
  if (chosen.size() < world_size) return std::nullopt;
  std::sort(chosen.begin(), chosen.end(),
            [](const KvSite& a, const KvSite& b) { return a.connection < b.connection; });
  return chosen;
}

double StepSeconds(const Division& division, const std::vector<KvSite>& sites) {
  KvWorkerRates slowest = sites.front().rates;
  for (const KvSite& site : sites) {
    slowest.memory_bytes_per_second =
        std::min(slowest.memory_bytes_per_second, site.rates.memory_bytes_per_second);
    const double flops = site.rates.flops_per_second;
    if (flops > 0 && (slowest.flops_per_second == 0 || flops < slowest.flops_per_second)) {
      slowest.flops_per_second = flops;
    }
  }
  return PredictKvStepSeconds(division.spec, division.placement, slowest);
}

// A division, with workers that have room for it.
struct Candidate {
  Division division;
  std::vector<KvSite> sites;
  double seconds = 0;

  int workers() const { return division.placement.world_size(); }
};

std::string TimeText(double seconds) {
  return absl::FormatDuration(absl::Trunc(absl::Seconds(seconds), absl::Microseconds(1)));
}

// Replaces `fewest`, or nothing, by a candidate with position parts or more workers that is faster
// or the only one with room. Returns why the result was chosen.
std::string TakeFaster(const KvCacheSpec& spec, const KvMembersRequest& request, int most,
                       const std::vector<KvSite>& sites, std::optional<Candidate>& fewest) {
  std::vector<Candidate> candidates;
  double best = std::numeric_limits<double>::infinity();
  for (int world_size = fewest ? fewest->workers() + 1 : 1; world_size <= most; ++world_size) {
    std::optional<Division> division = Divide(spec, request, world_size);
    if (!division) continue;
    auto taken = TakeRoomiest(*division, sites);
    if (!taken) continue;
    const double seconds = StepSeconds(*division, *taken);
    best = std::min(best, seconds);
    candidates.push_back({*std::move(division), *std::move(taken), seconds});
  }
  if (candidates.empty()) {
    return "the fewest workers that have room; more have none or cannot divide the blocks";
  }
  if (fewest && best >= kKvPartsGain * fewest->seconds) {
    return absl::StrCat("the fewest workers that have room; a step of a full cache takes ",
                        TimeText(fewest->seconds), ", and at least ", TimeText(best),
                        " with more (predicted)");
  }
  const auto chosen = std::find_if(
      candidates.begin(), candidates.end(),
      [&](const Candidate& candidate) { return candidate.seconds <= kKvPartsMargin * best; });
  const std::string earlier =
      fewest ? absl::StrCat(TimeText(fewest->seconds), " with ", fewest->workers())
             : "fewer have no room";
  fewest = std::move(*chosen);
  return absl::StrCat("a step of a full cache takes ", TimeText(fewest->seconds), " with ",
                      fewest->workers(), fewest->workers() == 1 ? " worker" : " workers",
                      " (predicted); ", earlier);
}

int64_t FewestKvHeads(const KvCacheSpec& spec) {
  int64_t heads = 0;  // the greatest common divisor
  for (const KvLayerGroup& group : spec.groups) heads = std::gcd(heads, group.num_kv_heads);
  return heads;
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
    const auto division = Divide(spec, request, fewest);
    if (!division) return Indivisible(spec, fewest);
    if (const auto taken = TakeRoomiest(*division, sites)) {
      return ReservationOn(*division, *taken, "the request names world_size");
    }
    return NoRoom(*division, sites, request.retry_after);
  }
  const bool divides =
      request.divide_blocks && FewestKvHeads(spec) < static_cast<int64_t>(sites.size());
  Division largest;  // that was tried
  std::optional<Candidate> candidate;
  for (int world_size = 1; world_size <= most && !candidate; ++world_size) {
    Division division{PlaceKvCache(spec, world_size), spec};
    if (division.placement.position_parts > 1) continue;
    if (auto taken = TakeRoomiest(division, sites)) {
      const double seconds = StepSeconds(division, *taken);
      candidate = Candidate{division, *std::move(taken), seconds};
    }
    largest = std::move(division);
  }
  std::string reason = "the fewest workers that have room";
  if (divides) reason = TakeFaster(spec, request, most, sites, candidate);
  if (candidate) return ReservationOn(candidate->division, candidate->sites, std::move(reason));
  for (int world_size = most; divides && world_size > largest.placement.world_size();
       --world_size) {
    auto division = Divide(spec, request, world_size);
    if (!division) continue;
    largest = *std::move(division);
    break;
  }
  return NoRoom(largest, sites, request.retry_after);
}

}  // namespace ringattn::server

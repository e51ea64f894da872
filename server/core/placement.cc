#include "server/core/placement.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <tuple>

namespace ringattn::server {

Placement Place(const std::vector<Site>& sites, int64_t buffer_bytes, int count) {
  assert(count >= 1 && count <= static_cast<int>(sites.size()));
  Placement placement;
  int roomy = 0;  // could hold it if they held nothing else
  int64_t most_room = std::numeric_limits<int64_t>::min();
  std::vector<std::tuple<int, int64_t, int>> idlest;  // operations, bytes, rank
  for (int rank = 0; rank < static_cast<int>(sites.size()); ++rank) {
    const Site& site = sites[rank];
    const int64_t room = site.memory_bytes - site.workspace_bytes;
    if (room > most_room) {
      most_room = room;
      placement.roomiest_rank = rank;
    }
    const bool unknown = site.memory_bytes == 0;
    if (!unknown && room < buffer_bytes) continue;
    ++roomy;
    if (!site.has_place) continue;
    if (!unknown && site.reserved_bytes > room - buffer_bytes) continue;
    idlest.emplace_back(site.operations, site.reserved_bytes, rank);
  }
  if (roomy < count) {
    placement.answer = Placement::Answer::kNeverFits;
    return placement;
  }
  if (static_cast<int>(idlest.size()) < count) return placement;
  std::partial_sort(idlest.begin(), idlest.begin() + count, idlest.end());
  for (int i = 0; i < count; ++i) placement.ranks.push_back(std::get<2>(idlest[i]));
  std::sort(placement.ranks.begin(), placement.ranks.end());
  placement.answer = Placement::Answer::kPlaced;
  return placement;
}

}  // namespace ringattn::server

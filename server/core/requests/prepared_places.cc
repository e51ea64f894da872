#include "server/core/requests/prepared_places.h"

#include <algorithm>

namespace ringattn::server {

void PreparedPlaces::Note(const std::string& principal, uint64_t fingerprint,
                          std::vector<ConnectionId> members, absl::Time until) {
  if (fingerprint == 0) return;
  places_[{principal, fingerprint}] = {std::move(members), until};
  if (places_.size() <= kMaxPlaces) return;
  places_.erase(std::min_element(places_.begin(), places_.end(), [](const auto& a, const auto& b) {
    return a.second.until < b.second.until;
  }));
}

const std::vector<ConnectionId>* PreparedPlaces::Find(const std::string& principal,
                                                      uint64_t fingerprint, absl::Time now) const {
  const auto found = places_.find({principal, fingerprint});
  if (found == places_.end() || found->second.until <= now) return nullptr;
  return &found->second.members;
}

}  // namespace ringattn::server

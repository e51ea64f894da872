// PreparedPlaces: which members keep what clients have prepared (PrepareOptions), so that equal
// requests are placed there. Only a preference: the members may have evicted it.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_PREPARED_PLACES_H_
#define RINGATTN_SERVER_CORE_REQUESTS_PREPARED_PLACES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/failure.h"

namespace ringattn::server {

// Holds the places of one generation. Not thread safe.
class PreparedPlaces {
 public:
  // 64 workers with 32 parts each. A place has about 200 bytes, so all take 400 KiB.
  static constexpr size_t kMaxPlaces = 2048;

  // `fingerprint`: RequestArrived::recipe_fingerprint; 0: unknown, and nothing is noted. Replaces
  // what is known of this recipe. Beyond kMaxPlaces, the place that ends first is forgotten.
  void Note(const std::string& principal, uint64_t fingerprint, std::vector<ConnectionId> members,
            absl::Time until);

  // Returns the members, by ring rank; null if none are known.
  const std::vector<ConnectionId>* Find(const std::string& principal, uint64_t fingerprint,
                                        absl::Time now) const;

  // The generation has ended.
  void Clear() { places_.clear(); }

  size_t size() const { return places_.size(); }

 private:
  struct Place {
    std::vector<ConnectionId> members;
    absl::Time until;
  };

  std::map<std::pair<std::string, uint64_t>, Place> places_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_PREPARED_PLACES_H_

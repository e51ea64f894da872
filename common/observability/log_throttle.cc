#include "common/observability/log_throttle.h"

#include <algorithm>
#include <utility>

namespace ringattn {

std::optional<int64_t> LogThrottle::Admit(absl::string_view kind, absl::Time now) {
  auto found = buckets_.find(kind);
  if (found == buckets_.end()) {
    const bool room = buckets_.size() < options_.max_kinds;
    found =
        buckets_
            .try_emplace(room ? std::string(kind) : std::string(), Bucket{options_.burst, now, 0})
            .first;
  }
  Bucket& bucket = found->second;
  const double seconds = std::max(0.0, absl::ToDoubleSeconds(now - bucket.filled_at));
  bucket.filled_at = now;
  bucket.tokens = std::min(options_.burst, bucket.tokens + seconds * options_.lines_per_second);
  if (bucket.tokens < 1) {
    ++bucket.suppressed;
    return std::nullopt;
  }
  bucket.tokens -= 1;
  return std::exchange(bucket.suppressed, 0);
}

}  // namespace ringattn

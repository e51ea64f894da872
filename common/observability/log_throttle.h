// LogThrottle: how often a kind of message may be logged.
#ifndef RINGATTN_COMMON_OBSERVABILITY_LOG_THROTTLE_H_
#define RINGATTN_COMMON_OBSERVABILITY_LOG_THROTTLE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ringattn {

struct LogThrottleOptions {
  // Lines of one kind: this many at once, and so many a second in the long run. 20 lines
  // of 250 bytes are 5 kB/s, 430 MB a day, of a kind that never rests.
  double burst = 200;
  double lines_per_second = 20;
  // Kinds that are told apart, some 100 bytes each; all others share one allowance.
  size_t max_kinds = 512;
};

// A token bucket for each kind. Thread compatible.
class LogThrottle {
 public:
  explicit LogThrottle(const LogThrottleOptions& options = {}) : options_(options) {}

  // The number of lines of this kind that were suppressed since its last one, or nothing
  // if this one is to be suppressed as well.
  std::optional<int64_t> Admit(absl::string_view kind, absl::Time now);

 private:
  struct Bucket {
    double tokens = 0;
    absl::Time filled_at;
    int64_t suppressed = 0;
  };

  const LogThrottleOptions options_;
  std::map<std::string, Bucket, std::less<>> buckets_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_OBSERVABILITY_LOG_THROTTLE_H_

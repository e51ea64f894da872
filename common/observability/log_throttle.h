// LogThrottle limits how often a kind of message is logged.
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
  // Lines of one kind: `burst` at once, and lines_per_second in the long run. 20 lines of 250 bytes
  // are 5 kB/s, or 430 MB a day.
  double burst = 200;
  double lines_per_second = 20;
  // Kinds with a limit of their own, about 100 bytes each. All other kinds share one limit.
  size_t max_kinds = 512;
};

// One token bucket per kind. Thread compatible.
class LogThrottle {
 public:
  explicit LogThrottle(const LogThrottleOptions& options = {}) : options_(options) {}

  // Returns the number of lines of this kind that were suppressed since the last one, or nullopt if
  // this line is to be suppressed too.
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

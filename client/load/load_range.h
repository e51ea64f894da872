// Parses START:END:STEP, the levels of a load test.
// Tests: load_test.cc.
#ifndef RINGATTN_CLIENT_LOAD_LOAD_RANGE_H_
#define RINGATTN_CLIENT_LOAD_LOAD_RANGE_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ringattn::client::load {

// The maximum number of levels.
inline constexpr int kMaxLevels = 1000;

// "4" is one level; "1:16" has step 1; "1:16:5" is 1, 6, 11, 16. The end is included if a step
// reaches it. Errors: INVALID_ARGUMENT with the reason if a field is not a number, a level or step
// is not positive, the end is before the start, or there are too many levels.
absl::StatusOr<std::vector<double>> ParseLevels(absl::string_view text);

// The same for whole numbers up to `max`.
absl::StatusOr<std::vector<int>> ParseWholeLevels(absl::string_view text, int max);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_LOAD_RANGE_H_

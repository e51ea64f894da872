// START:END:STEP, the levels of a load test.
#ifndef RINGATTN_CLIENT_LOAD_LOAD_RANGE_H_
#define RINGATTN_CLIENT_LOAD_LOAD_RANGE_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ringattn::client::load {

// No test has more levels.
inline constexpr int kMaxLevels = 1000;

// "4" is one level; "1:16" steps by 1; "1:16:5" is 1, 6, 11, 16. The end belongs to it where a step
// meets it. Errors: INVALID_ARGUMENT, saying what is wrong, for anything that is no number, levels
// that are not above 0, an end before the start, a step that is not above 0, or too many levels.
absl::StatusOr<std::vector<double>> ParseLevels(absl::string_view text);

// The same of whole numbers up to `max`.
absl::StatusOr<std::vector<int>> ParseWholeLevels(absl::string_view text, int max);

}  // namespace ringattn::client::load

#endif  // RINGATTN_CLIENT_LOAD_LOAD_RANGE_H_

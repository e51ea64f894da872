// Counts in texts.
#ifndef RINGATTN_COMMON_BASE_COUNTED_H_
#define RINGATTN_COMMON_BASE_COUNTED_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ringattn {

// Returns "1 worker" or "2 workers".
inline std::string Counted(int64_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_COUNTED_H_

// A flag for a duration: "500ms", "5s".
#ifndef RINGATTN_COMMON_PROCESS_DURATION_FLAG_H_
#define RINGATTN_COMMON_PROCESS_DURATION_FLAG_H_

#include <string>

#include "absl/time/time.h"

namespace CLI {
class App;
}

namespace ringattn {

// Adds the flag; its help ends with the current value of *target. Parsing throws
// CLI::ValidationError unless the duration is finite and above 0. `target` must outlive the
// parsing.
void AddDuration(CLI::App* app, const std::string& name, absl::Duration* target,
                 const std::string& help);

// The same for an option that 0 turns off.
void AddDurationOrZero(CLI::App* app, const std::string& name, absl::Duration* target,
                       const std::string& help);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_DURATION_FLAG_H_

// A flag for a number of bytes: "1073741824", "512MiB", "1.5GiB".
#ifndef RINGATTN_COMMON_PROCESS_SIZE_FLAG_H_
#define RINGATTN_COMMON_PROCESS_SIZE_FLAG_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace ringattn {

// Returns the bytes of a size: a number that is not negative, and optionally B, KiB, MiB, GiB or
// TiB. The i and the B may be omitted, and case does not matter: "10M", "10MB" and "10mib" are 10 *
// 2^20. Returns nullopt for other texts and above 2^62.
std::optional<int64_t> ParseSize(absl::string_view text);

// Adds the flag. Parsing throws CLI::ValidationError unless the value is a size in [min, max]. The
// caller adds a default to the help. `target` must outlive the parsing.
CLI::Option* AddSize(CLI::App* app, const std::string& name, int64_t* target, int64_t min,
                     int64_t max, const std::string& help);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_SIZE_FLAG_H_

// The common part of all commands: registration, errors and exit codes.
#ifndef RINGATTN_CLIENT_CLI_COMMAND_H_
#define RINGATTN_CLIENT_CLI_COMMAND_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cli/flag_set.h"
#include "nlohmann/json_fwd.hpp"

namespace ringattn::client::cli {

// Exit codes; documented in docs/cli-json.md.
inline constexpr int kSuccess = 0;
inline constexpr int kMismatch = 1;  // verify and bench: a result is wrong
inline constexpr int kUsage = 2;     // the command line is wrong
inline constexpr int kFailure = 3;   // any other error; printed to stderr
inline constexpr int kUnjudged = 4;  // verify: no mismatch, but not everything could be judged

using Json = nlohmann::ordered_json;

// The chosen command, bound to its parsed flags. Returns the exit code.
using Run = std::function<int()>;

// Each adds its command to `program`. Parsing the command line sets `run`.
void AddGenerate(FlagSet& program, Run& run);
void AddForward(FlagSet& program, Run& run);
void AddBackward(FlagSet& program, Run& run);
void AddVerify(FlagSet& program, Run& run);
void AddPlan(FlagSet& program, Run& run);
void AddInfo(FlagSet& program, Run& run);
void AddTopology(FlagSet& program, Run& run);
void AddBench(FlagSet& program, Run& run);
void AddCache(FlagSet& program, Run& run);
void AddUp(FlagSet& program, Run& run);
void AddDown(FlagSet& program, Run& run);
void AddWorkers(FlagSet& program, Run& run);

// Returns INVALID_ARGUMENT for an error in the command line itself, found before any file or server
// is used. Fail maps it to kUsage.
absl::Status UsageError(absl::string_view message);

// Prints the error with its code and violations to stderr and, if `json`, as an object {"error":
// ...} to stdout. Returns kUsage for a UsageError, otherwise kFailure.
int Fail(const absl::Status& status, bool json);

// Prints one object to stdout.
void Print(const Json& object);

// Parses "30s" or "1.5m"; "" is infinite. Errors: UsageError.
absl::StatusOr<absl::Duration> ParseDeadline(const std::string& text);

// Parses "10m"; returns nothing for an empty text. Errors: a UsageError naming --retain.
absl::StatusOr<std::optional<absl::Duration>> ParseRetain(const std::string& text);

// Adds --progress_interval: the time between two lines on stderr if it is not a terminal. "0" means
// never. Errors: UsageError.
void AddProgressFlag(FlagSet& command, std::string* interval);
absl::StatusOr<absl::Duration> ParseProgressInterval(const std::string& text);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_COMMAND_H_

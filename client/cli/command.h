// What all commands share: how they are registered, and how they end.
#ifndef RINGATTN_CLIENT_CLI_COMMAND_H_
#define RINGATTN_CLIENT_CLI_COMMAND_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "nlohmann/json_fwd.hpp"

namespace CLI {
class App;
}

namespace ringattn::client::cli {

// Exit codes, documented in docs/cli-json.md.
inline constexpr int kSuccess = 0;
inline constexpr int kMismatch = 1;  // verify and bench: a result is wrong
inline constexpr int kUsage = 2;     // the command line itself
inline constexpr int kFailure = 3;   // anything else, with the error on stderr
inline constexpr int kUnjudged = 4;  // verify: no mismatch, but not everything was judged

using Json = nlohmann::ordered_json;

// The chosen command, bound to its parsed flags; returns the exit code.
using Run = std::function<int()>;

// Each adds its subcommand to `app`; parsing the command line sets `run`.
void AddGenerate(CLI::App& app, Run& run);
void AddForward(CLI::App& app, Run& run);
void AddBackward(CLI::App& app, Run& run);
void AddVerify(CLI::App& app, Run& run);
void AddPlan(CLI::App& app, Run& run);
void AddInfo(CLI::App& app, Run& run);
void AddTopology(CLI::App& app, Run& run);
void AddBench(CLI::App& app, Run& run);
void AddUp(CLI::App& app, Run& run);
void AddDown(CLI::App& app, Run& run);
void AddWorkers(CLI::App& app, Run& run);

// INVALID_ARGUMENT for what the command line itself gets wrong, before a file or a
// server is asked: Fail makes it kUsage.
absl::Status UsageError(absl::string_view message);

// Prints the error, with its code and violations, to stderr and, if `json`, as an
// object {"error": ...} to stdout. Returns kUsage for a UsageError, else kFailure.
int Fail(const absl::Status& status, bool json);

// One object on stdout.
void Print(const Json& object);

// "30s", "1.5m"; "" is infinite. Errors: UsageError.
absl::StatusOr<absl::Duration> ParseDeadline(const std::string& text);

// "10m"; nothing for an empty text. Errors: a UsageError naming --retain.
absl::StatusOr<std::optional<absl::Duration>> ParseRetain(const std::string& text);

// --progress_interval of commands that take long: between two lines on stderr where it is
// no terminal. "0" is never. Errors: UsageError.
void AddProgressFlag(CLI::App* command, std::string* interval);
absl::StatusOr<absl::Duration> ParseProgressInterval(const std::string& text);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_COMMAND_H_

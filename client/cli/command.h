// What all commands share: how they are registered, and how they end.
#ifndef RINGATTN_CLIENT_CLI_COMMAND_H_
#define RINGATTN_CLIENT_CLI_COMMAND_H_

#include <functional>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

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

// Prints the error, with its code and violations, to stderr and, if `json`, as an
// object {"error": ...} to stdout. Returns kFailure.
int Fail(const absl::Status& status, bool json);

// One object on stdout.
void Print(const Json& object);

// "30s", "1.5m"; "" is infinite. Errors: INVALID_ARGUMENT.
absl::StatusOr<absl::Duration> ParseDeadline(const std::string& text);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_COMMAND_H_

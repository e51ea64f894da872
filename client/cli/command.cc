#include "client/cli/command.h"

#include <cstdio>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "client/cli/flag_set.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

// Marks a status as a usage error.
constexpr absl::string_view kUsageUrl = "ringattn.cli/usage";

}  // namespace

absl::Status UsageError(absl::string_view message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kUsageUrl, absl::Cord());
  return status;
}

int Fail(const absl::Status& status, bool json) {
  std::fprintf(stderr, "error: %s\n", FormatError(status).c_str());
  if (json) {
    const ErrorDetails details = DetailsOf(status);
    Json error = {{"code", absl::StatusCodeToString(status.code())},
                  {"message", std::string(status.message())},
                  {"reason", details.reason},
                  {"violations", Json::array()}};
    for (const FieldViolation& violation : details.violations) {
      error["violations"].push_back(
          {{"field", violation.field}, {"description", violation.description}});
    }
    Print({{"error", error}});
  }
  return status.GetPayload(kUsageUrl).has_value() ? kUsage : kFailure;
}

void Print(const Json& object) {
  // File names may contain any bytes; replace invalid UTF-8 so that the output is valid JSON.
  std::puts(object.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
}

absl::StatusOr<absl::Duration> ParseDeadline(const std::string& text) {
  if (text.empty()) return absl::InfiniteDuration();
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration) || duration <= absl::ZeroDuration()) {
    return UsageError(
        absl::StrCat("--deadline=", text, ": expected a positive duration like 30s or 1.5m"));
  }
  return duration;
}

absl::StatusOr<std::optional<absl::Duration>> ParseRetain(const std::string& text) {
  if (text.empty()) return std::nullopt;
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration) || duration <= absl::ZeroDuration()) {
    return UsageError(
        absl::StrCat("--retain=", text, ": expected a positive duration like 30s or 10m"));
  }
  return std::optional<absl::Duration>(duration);
}

void AddProgressFlag(FlagSet& command, std::string* interval) {
  command
      .Add("--progress_interval", interval,
           "If stderr is not a terminal: print a progress line this often; 0: never")
      .ShowDefault();
}

absl::StatusOr<absl::Duration> ParseProgressInterval(const std::string& text) {
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration) || duration < absl::ZeroDuration()) {
    return UsageError(absl::StrCat("--progress_interval=", text, ": expected a duration like 10s"));
  }
  return duration == absl::ZeroDuration() ? absl::InfiniteDuration() : duration;
}

}  // namespace ringattn::client::cli

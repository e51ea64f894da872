#include "client/cli/command.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "client/error.h"

namespace ringattn::client::cli {

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
  return kFailure;
}

void Print(const Json& object) {
  // Names in files may be any bytes; the output stays valid JSON.
  std::puts(object.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
}

absl::StatusOr<absl::Duration> ParseDeadline(const std::string& text) {
  if (text.empty()) return absl::InfiniteDuration();
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration) || duration <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--deadline=", text, ": expected a positive duration like 30s or 1.5m"));
  }
  return duration;
}

}  // namespace ringattn::client::cli

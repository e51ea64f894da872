#include "common/wire/grpc_log.h"

#include <algorithm>

#include <grpc/support/log.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/observability/log.h"

namespace ringattn::wire {
namespace {

LogLevel LevelOf(gpr_log_severity severity) {
  switch (severity) {
    case GPR_LOG_SEVERITY_DEBUG:
      return LogLevel::kDebug;
    case GPR_LOG_SEVERITY_INFO:
      return LogLevel::kInfo;
    case GPR_LOG_SEVERITY_ERROR:
      return LogLevel::kError;
  }
  return LogLevel::kError;
}

void Write(gpr_log_func_args* said) {
  absl::string_view file(said->file);
  file.remove_prefix(std::min(file.size(), file.rfind('/') + 1));
  // One kind of message per source location, so that locations do not share a rate limit.
  Log(LevelOf(said->severity), absl::StrCat("gRPC, ", file, ":", said->line),
      {{"text", absl::string_view(said->message)}});
}

}  // namespace

void LogForGrpc() { gpr_set_log_function(Write); }

}  // namespace ringattn::wire

// Structured logs: one JSON object per line, on stderr.
//
//   LogInfo("request accepted", {{"request_id", id}, {"generation", generation}});
//   {"time":"2026-01-01T00:00:00.000Z","level":"info","process":"ringattn-server",
//    "message":"request accepted","request_id":"r1","generation":7}
//
// Lines of one kind (the same message, whatever the fields) are limited in rate (log_throttle.h).
// The next line of that kind has the number of suppressed lines as "suppressed". So a message must
// be a constant; variable data belongs in fields.
//
// Common keys: request_id, operation_id, generation, worker, rank. Tensor contents and secrets are
// never logged. All functions are thread safe.
#ifndef RINGATTN_COMMON_OBSERVABILITY_LOG_H_
#define RINGATTN_COMMON_OBSERVABILITY_LOG_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <variant>

#include "absl/strings/string_view.h"

namespace ringattn {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
// "debug", "info", "warning", "error".
std::optional<LogLevel> LogLevelFromName(absl::string_view name);

// Borrows its strings for the duration of the call it is passed to.
struct LogField {
  using Value = std::variant<absl::string_view, int64_t, uint64_t, double, bool>;

  template <std::signed_integral T>
  LogField(absl::string_view k, T v) : key(k), value(static_cast<int64_t>(v)) {}
  template <std::unsigned_integral T>
  LogField(absl::string_view k, T v) : key(k), value(static_cast<uint64_t>(v)) {}
  LogField(absl::string_view k, bool v) : key(k), value(v) {}
  LogField(absl::string_view k, double v) : key(k), value(v) {}
  LogField(absl::string_view k, absl::string_view v) : key(k), value(v) {}
  LogField(absl::string_view k, const std::string& v) : key(k), value(absl::string_view(v)) {}
  LogField(absl::string_view k, const char* v) : key(k), value(absl::string_view(v)) {}

  absl::string_view key;
  Value value;
};

// Sets the process name and the level, and starts a thread that writes the lines. If the reader of
// stderr stalls, the oldest lines are dropped and no caller blocks. Without this call, lines are
// written immediately under the name "ringattn".
void InitLogging(absl::string_view process, LogLevel level);
// Writes queued lines, for example before _exit(). No logging is permitted after it.
void ShutdownLogging();

// Returns whether lines of this level are written, for callers whose fields are costly to make.
bool LogIsOn(LogLevel level);

void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields = {});

inline void LogDebug(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kDebug, message, fields);
}
inline void LogInfo(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kWarning, message, fields);
}
inline void LogError(absl::string_view message, std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kError, message, fields);
}

// Returns the line that Log writes, without its end. For tests.
std::string FormatLogLine(absl::string_view process, LogLevel level, absl::string_view message,
                          std::initializer_list<LogField> fields, int64_t suppressed = 0);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_OBSERVABILITY_LOG_H_

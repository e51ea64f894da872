#include "common/observability/log.h"

#include <spdlog/async.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>

#include <nlohmann/json.hpp>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "common/observability/log_throttle.h"

namespace ringattn {
namespace {

constexpr size_t kQueuedLines = 8192;  // about 2 MiB
constexpr char kLoggerName[] = "ringattn";

// Reading spdlog's own level takes a lock and a lookup by name.
std::atomic<LogLevel> lowest_level = LogLevel::kInfo;

const char* LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "";
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

// Set once, before other threads log.
std::string& ProcessName() {
  static auto* name = new std::string("ringattn");
  return *name;
}

std::shared_ptr<spdlog::logger> Logger() {
  static const bool has_default = [] {
    if (spdlog::get(kLoggerName) == nullptr) {
      spdlog::stderr_logger_mt(kLoggerName)->set_pattern("%v");
    }
    return true;
  }();
  (void)has_default;
  return spdlog::get(kLoggerName);
}

// Returns how many lines of this kind were suppressed since the last one; nullopt: suppress this
// one too.
std::optional<int64_t> Admit(absl::string_view kind) {
  static auto* mutex = new absl::Mutex;
  static auto* throttle = new LogThrottle;
  const absl::Time now = MonotonicNow();
  absl::MutexLock lock(mutex);
  return throttle->Admit(kind, now);
}

}  // namespace

std::optional<LogLevel> LogLevelFromName(absl::string_view name) {
  for (LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    if (name == LevelName(level)) return level;
  }
  return std::nullopt;
}

void InitLogging(absl::string_view process, LogLevel level) {
  ProcessName() = std::string(process);
  spdlog::drop(kLoggerName);
  spdlog::init_thread_pool(kQueuedLines, 1);
  auto logger = spdlog::create_async_nb<spdlog::sinks::stderr_sink_mt>(kLoggerName);
  logger->set_pattern("%v");
  logger->set_level(ToSpdlog(level));
  lowest_level = level;
}

void ShutdownLogging() { spdlog::shutdown(); }

bool LogIsOn(LogLevel level) { return level >= lowest_level.load(std::memory_order_relaxed); }

void Log(LogLevel level, absl::string_view message, std::initializer_list<LogField> fields) {
  if (!LogIsOn(level)) return;
  const std::optional<int64_t> suppressed = Admit(message);
  if (!suppressed.has_value()) return;
  const std::shared_ptr<spdlog::logger> logger = Logger();
  if (logger == nullptr) return;
  logger->log(ToSpdlog(level), FormatLogLine(ProcessName(), level, message, fields, *suppressed));
}

std::string FormatLogLine(absl::string_view process, LogLevel level, absl::string_view message,
                          std::initializer_list<LogField> fields, int64_t suppressed) {
  nlohmann::ordered_json line;
  line["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone());
  line["level"] = LevelName(level);
  line["process"] = std::string(process);
  line["message"] = std::string(message);
  for (const LogField& field : fields) {
    nlohmann::ordered_json& target = line[std::string(field.key)];
    if (const auto* text = std::get_if<absl::string_view>(&field.value)) {
      target = std::string(*text);
    } else {
      std::visit(
          [&](const auto& value) {
            if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>) target = value;
          },
          field.value);
    }
  }
  if (suppressed > 0) line["suppressed"] = suppressed;
  // Replaces bytes that are not UTF-8 by replacement characters.
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace ringattn

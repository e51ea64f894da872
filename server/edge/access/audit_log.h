// AuditLog: the record of requests: one JSON object per line for every Forward and Backward call
// that ended, and for every Cancel. Unlike other logs, it is never sampled.
#ifndef RINGATTN_SERVER_EDGE_ACCESS_AUDIT_LOG_H_
#define RINGATTN_SERVER_EDGE_ACCESS_AUDIT_LOG_H_

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/observability/log.h"
#include "common/observability/metrics.h"

namespace ringattn::server {

// A dedicated thread appends the lines, so that a slow disk delays no request. At most this many
// lines wait (about 40 MiB). Lines beyond that, and lines that cannot be written, are dropped and
// counted in ringattn_audit_lines_lost_total. A file that was moved away is reopened. Thread safe.
class AuditLog {
 public:
  static constexpr size_t kMaxQueuedLines = 65536;

  // "-" is standard output. Returns INVALID_ARGUMENT if the file cannot be appended to.
  static absl::StatusOr<std::unique_ptr<AuditLog>> Open(const std::string& path, Metrics* metrics);
  ~AuditLog();  // writes the waiting lines

  // Appends one line. `fields` must not contain tensor contents, tokens or secrets.
  void Write(std::initializer_list<LogField> fields) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  AuditLog(const std::string& path, int file, Metrics* metrics);

  void Run();
  void Append(const std::string& lines, int64_t count);
  void ReopenIfMoved();

  const std::string path_;
  prometheus::Counter& lost_;
  // Used by the thread only.
  int file_;
  bool within_line_;  // the file ends with a part of a line
  absl::Mutex mutex_;
  std::deque<std::string> waiting_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_ACCESS_AUDIT_LOG_H_

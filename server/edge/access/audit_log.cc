#include "server/edge/access/audit_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::server {
namespace {

// The log contains all clients' requests, so others must not read it.
constexpr mode_t kMode = 0640;

int OpenFile(const std::string& path) {
  if (path == "-") return STDOUT_FILENO;
  return open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, kMode);
}

// Returns whether the file ends with a part of a line, after a full disk.
bool EndsWithinLine(const std::string& path) {
  if (path == "-") return false;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return false;
  struct stat about {};
  char last = '\n';
  if (fstat(file, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0 &&
      pread(file, &last, 1, about.st_size - 1) != 1) {
    last = '\n';
  }
  close(file);
  return last != '\n';
}

}  // namespace

absl::StatusOr<std::unique_ptr<AuditLog>> AuditLog::Open(const std::string& path,
                                                         Metrics* metrics) {
  const int file = OpenFile(path);
  if (file < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot append to the audit log ", path, ": ", strerror(errno)));
  }
  return std::unique_ptr<AuditLog>(new AuditLog(path, file, metrics));
}

AuditLog::AuditLog(const std::string& path, int file, Metrics* metrics)
    : path_(path),
      lost_(metrics
                ->Counters("ringattn_audit_lines_lost_total",
                           "Audit log lines that were dropped because they could not be written.")
                .Add({})),
      file_(file),
      within_line_(EndsWithinLine(path)),
      thread_([this] { Run(); }) {}

AuditLog::~AuditLog() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
  if (path_ != "-" && file_ >= 0) close(file_);
}

void AuditLog::Write(std::initializer_list<LogField> fields) {
  std::string line = FormatLogLine("ringattn-server", LogLevel::kInfo, "audit", fields);
  line += '\n';
  absl::MutexLock lock(&mutex_);
  if (waiting_.size() >= kMaxQueuedLines) {
    waiting_.pop_front();
    lost_.Increment();
  }
  waiting_.push_back(std::move(line));
}

void AuditLog::Run() {
  const auto has_news = [this] {
    mutex_.AssertHeld();
    return !waiting_.empty() || stopping_;
  };
  while (true) {
    std::deque<std::string> lines;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_news));
      lines.swap(waiting_);
      if (lines.empty()) return;
    }
    ReopenIfMoved();
    // Ends the part of a line that did not fit on the disk.
    std::string text = within_line_ ? "\n" : "";
    for (const std::string& line : lines) text += line;
    Append(text, static_cast<int64_t>(lines.size()));
  }
}

void AuditLog::Append(const std::string& lines, int64_t count) {
  size_t written = 0;
  while (file_ >= 0 && written < lines.size()) {
    const ssize_t some = write(file_, lines.data() + written, lines.size() - written);
    if (some < 0 && errno == EINTR) continue;
    if (some <= 0) break;
    written += static_cast<size_t>(some);
  }
  if (written > 0) within_line_ = lines[written - 1] != '\n';
  if (written == lines.size()) return;
  const int64_t kept = std::count(lines.begin() + (lines[0] == '\n' ? 1 : 0),
                                  lines.begin() + std::max<size_t>(written, 1), '\n');
  lost_.Increment(static_cast<double>(count - kept));
  LogError("the audit log cannot be written", {{"file", path_}, {"why", strerror(errno)}});
}

void AuditLog::ReopenIfMoved() {
  if (path_ == "-") return;
  struct stat there {
  }, ours{};
  const bool same = file_ >= 0 && stat(path_.c_str(), &there) == 0 && fstat(file_, &ours) == 0 &&
                    there.st_ino == ours.st_ino && there.st_dev == ours.st_dev;
  if (same) return;
  const int opened = OpenFile(path_);
  if (opened < 0) return;  // keep the old file
  if (file_ >= 0) close(file_);
  file_ = opened;
  within_line_ = EndsWithinLine(path_);
}

}  // namespace ringattn::server

#include "client/launcher/state_dir.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/launcher/child_process.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {
namespace {

constexpr char kPidFile[] = "launcher.pid";
constexpr char kSecretFile[] = "secret";
constexpr char kEndTimeoutFile[] = "end_timeout";

absl::Status SystemError(const std::string& what) { return absl::ErrnoToStatus(errno, what); }

absl::Status MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return SystemError(path);
  struct stat info;
  // Not stat: in a shared folder such as /tmp, another user may have put a link there.
  if (lstat(path.c_str(), &info) != 0) return SystemError(path);
  if (!S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": not a folder"));
  }
  if (info.st_uid != geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat(path, ": belongs to another user"));
  }
  // Others could replace the files that the launcher opens, or read the logs.
  if ((info.st_mode & 077) != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "%s: other users have access (mode %04o); allow only yours with: chmod 700 %s", path,
        static_cast<unsigned>(info.st_mode & 07777), path));
  }
  return absl::OkStatus();
}

absl::Status WriteWhole(int fd, absl::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written < 0) return SystemError(path);
    text.remove_prefix(written);
  }
  return absl::OkStatus();
}

}  // namespace

std::string DefaultStateDir() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && runtime[0] == '/') return absl::StrCat(runtime, "/ringattn");
  return absl::StrCat("/tmp/ringattn-", getuid());
}

absl::StatusOr<StateDir> StateDir::Acquire(const std::string& path) {
  if (absl::Status status = MakeFolder(path); !status.ok()) return status;
  const std::string pid_file = absl::StrCat(path, "/", kPidFile);
  const int fd = open(pid_file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return SystemError(pid_file);
  StateDir state(path, fd);
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    close(std::exchange(state.lock_, -1));
    const auto running = RunningLauncher(path);
    return absl::FailedPreconditionError(absl::StrCat(
        "a launcher already runs in ", path, running ? " with process id " : "",
        running ? absl::StrCat(*running) : "", "; end it with: ringattn down --state_dir=", path));
  }
  if (ftruncate(fd, 0) != 0) return SystemError(pid_file);
  if (absl::Status status = WriteWhole(fd, absl::StrCat(getpid(), "\n"), pid_file); !status.ok()) {
    return status;
  }
  return state;
}

StateDir::StateDir(StateDir&& other) noexcept
    : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}

StateDir::~StateDir() {
  if (lock_ < 0) return;
  unlink(File(kSecretFile).c_str());
  // Truncate instead of unlinking: a new launcher may already be waiting for this file's lock.
  if (ftruncate(lock_, 0) != 0) {
    // Ignored: the lock, not the file's content, shows whether a launcher runs.
  }
  close(lock_);
}

absl::Status StateDir::WriteEndTimeout(absl::Duration timeout) const {
  const std::string path = File(kEndTimeoutFile);
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return SystemError(path);
  const absl::Status status = WriteWhole(fd, absl::FormatDuration(timeout), path);
  close(fd);
  return status;
}

absl::StatusOr<std::string> StateDir::WriteSecret() const {
  unsigned char bytes[32];
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) return SystemError("getrandom");
  const std::string path = File(kSecretFile);
  unlink(path.c_str());
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return SystemError(path);
  const std::string text = absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(bytes), sizeof(bytes)));
  const absl::Status status = WriteWhole(fd, text, path);
  close(fd);
  if (!status.ok()) return status;
  return path;
}

std::optional<pid_t> RunningLauncher(const std::string& path) {
  const int fd = open(absl::StrCat(path, "/", kPidFile).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return std::nullopt;
  std::optional<pid_t> running;
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    char text[32] = {};
    int pid = 0;
    if (pread(fd, text, sizeof(text) - 1, 0) > 0 && absl::SimpleAtoi(text, &pid) && pid > 0) {
      running = pid;
    }
  }
  close(fd);
  return running;
}

absl::Duration EndTimeout(const std::string& path) {
  std::ifstream file(absl::StrCat(path, "/", kEndTimeoutFile));
  std::string text;
  absl::Duration timeout;
  const bool read = std::getline(file, text) && absl::ParseDuration(text, &timeout);
  return read ? timeout : absl::Minutes(1);
}

absl::StatusOr<bool> StopLauncher(
    const std::string& path, absl::Duration timeout,
    const std::function<void(const std::vector<std::string>&)>& report) {
  const std::optional<pid_t> pid = RunningLauncher(path);
  if (!pid) return false;
  absl::Time report_at = MonotonicNow() + absl::Seconds(1);
  const auto gone_by = [&](absl::Time end) {
    while (MonotonicNow() < end) {
      if (MonotonicNow() >= report_at) {
        report(DescribeChildren(*pid));
        report_at += absl::Seconds(5);
      }
      const char state = ProcessState(*pid);
      if (RunningLauncher(path) != pid && (state == 0 || state == 'Z')) return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  };
  if (kill(*pid, SIGTERM) != 0 && errno != ESRCH) return SystemError("kill");
  // A stopped launcher would not see the signal.
  kill(*pid, SIGCONT);
  if (gone_by(MonotonicNow() + timeout)) return true;
  kill(*pid, SIGKILL);
  if (gone_by(MonotonicNow() + absl::Seconds(5))) return true;
  return absl::DeadlineExceededError(absl::StrCat("launcher ", *pid, " did not end"));
}

}  // namespace ringattn::client

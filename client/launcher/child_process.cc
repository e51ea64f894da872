#include "client/launcher/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ringattn::client {
namespace {

// Runs in the child between fork and exec, where only async-signal-safe calls are allowed.
[[noreturn]] void BecomeCommand(char* const* arguments, int log, int null, pid_t parent,
                                int error_pipe) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The parent may have ended before the line above.
  if (getppid() != parent) _exit(127);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  dup2(null, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execv(arguments[0], arguments);
  const int error = errno;
  const ssize_t ignored = write(error_pipe, &error, sizeof(error));
  (void)ignored;
  _exit(127);
}

}  // namespace

absl::StatusOr<pid_t> StartChild(const std::vector<std::string>& command,
                                 const std::string& log_path) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const int log =
      log_path.empty()
          ? fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3)
          : open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (log < 0) return absl::ErrnoToStatus(errno, log_path);
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  int error_pipe[2] = {-1, -1};
  if (null < 0 || pipe2(error_pipe, O_CLOEXEC) != 0) {
    const int error = errno;
    close(log);
    close(null);
    return absl::ErrnoToStatus(error, "pipe");
  }

  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) BecomeCommand(arguments.data(), log, null, parent, error_pipe[1]);
  const int fork_error = errno;
  close(log);
  close(null);
  close(error_pipe[1]);
  // Returns at once: exec closes the child's end.
  int exec_error = 0;
  const bool failed =
      pid > 0 && read(error_pipe[0], &exec_error, sizeof(exec_error)) == sizeof(exec_error);
  close(error_pipe[0]);
  if (pid < 0) return absl::ErrnoToStatus(fork_error, "fork");
  if (failed) {
    waitpid(pid, nullptr, 0);
    return absl::ErrnoToStatus(exec_error, command[0]);
  }
  return pid;
}

char ProcessState(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return 0;
  // "pid (name) S ...": the name may contain any character, parentheses included.
  const size_t end = line.rfind(')');
  return end != std::string::npos && end + 2 < line.size() ? line[end + 2] : 0;
}

std::vector<std::string> DescribeChildren(pid_t parent) {
  std::vector<std::string> children;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    pid_t pid = 0;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &pid)) continue;
    std::ifstream file(entry.path() / "stat");
    std::string line;
    if (!std::getline(file, line)) continue;
    // "pid (name) S parent ...": the name may contain any character.
    const size_t begin = line.find('(');
    const size_t end = line.rfind(')');
    if (begin == std::string::npos || end == std::string::npos || end + 4 > line.size()) continue;
    const char state = line[end + 2];
    if (state == 'Z' || std::atoi(line.c_str() + end + 4) != parent) continue;
    children.push_back(
        absl::StrCat(line.substr(begin + 1, end - begin - 1), " (process id ", pid, ")"));
  }
  return children;
}

std::string DescribeExit(int wait_status) {
  if (WIFEXITED(wait_status)) return absl::StrCat("exited with ", WEXITSTATUS(wait_status));
  return absl::StrCat("killed by signal ", WTERMSIG(wait_status));
}

}  // namespace ringattn::client

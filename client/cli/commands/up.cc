#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command.h"
#include "client/cli/flag_set.h"
#include "client/cli/report.h"
#include "client/cli/server_flags.h"
#include "client/launcher/launcher.h"
#include "common/base/counted.h"

namespace ringattn::client::cli {
namespace {

struct UpFlags {
  LauncherOptions launcher;
  ServerFlags own;  // for the launcher's own calls
  std::string ready_timeout = "60s";
  std::string drain_timeout = "30s";
  std::string stop_timeout = "10s";
  std::string silent_timeout = "40s";
  bool detach = false;
};

std::string ReadyText(const LauncherOptions& options, const Launcher& launcher) {
  return absl::StrCat("ringattn is up: gRPC address ", launcher.address(), ", ",
                      Counted(options.workers, "worker"), "\nlive page at http://",
                      launcher.metrics_address(), "/, metrics at /metrics, logs in ",
                      launcher.log_dir(), "\n");
}

// Starts everything, calls `report` with the text for the user, and supervises.
int Serve(const LauncherOptions& options,
          const std::function<void(const absl::StatusOr<std::string>&)>& report) {
  auto launcher = Launcher::Start(options);
  if (!launcher.ok()) {
    report(launcher.status());
    return kFailure;
  }
  if (absl::Status status = (*launcher)->WaitUntilReady(); !status.ok()) {
    report(status);
    return kFailure;
  }
  report(ReadyText(options, **launcher));
  (*launcher)->Run();
  return kSuccess;
}

int RunInForeground(const LauncherOptions& options) {
  int code = kSuccess;
  const int ended = Serve(options, [&](const absl::StatusOr<std::string>& text) {
    if (!text.ok()) {
      code = Fail(text.status(), false);
      return;
    }
    std::printf("%sCtrl-C ends it.\n", text->c_str());
    std::fflush(stdout);
  });
  return code != kSuccess ? code : ended;
}

// The child runs in a new session. This process waits on a pipe for the child's result: an
// 'E' or an 'R', followed by the text.
int RunDetached(const LauncherOptions& options) {
  int pipe_ends[2];
  if (pipe2(pipe_ends, O_CLOEXEC) != 0) return Fail(absl::ErrnoToStatus(errno, "pipe"), false);
  const pid_t pid = fork();
  if (pid < 0) return Fail(absl::ErrnoToStatus(errno, "fork"), false);
  if (pid == 0) {
    close(pipe_ends[0]);
    setsid();
    const int code = Serve(options, [&](const absl::StatusOr<std::string>& text) {
      // From here on this process's streams have no reader.
      const std::string log = absl::StrCat(options.state_dir, "/launcher.log");
      const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
      const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
      dup2(null, STDIN_FILENO);
      dup2(out >= 0 ? out : null, STDOUT_FILENO);
      dup2(out >= 0 ? out : null, STDERR_FILENO);
      const std::string word =
          text.ok() ? absl::StrCat("R", *text)
                    : absl::StrCat("E", text.status().raw_code(), " ", text.status().message());
      const ssize_t ignored = write(pipe_ends[1], word.data(), word.size());
      (void)ignored;
      close(pipe_ends[1]);
    });
    // Not exit(): the parent runs the handlers that it registered.
    _exit(code);
  }
  close(pipe_ends[1]);
  std::string word;
  char buffer[4096];
  ssize_t got;
  while ((got = read(pipe_ends[0], buffer, sizeof(buffer))) > 0) word.append(buffer, got);
  close(pipe_ends[0]);
  if (word.size() > 1 && word[0] == 'R') {
    std::printf("%sEnd it with: ringattn down --state_dir=%s\n", word.c_str() + 1,
                options.state_dir.c_str());
    return kSuccess;
  }
  if (word.size() > 1 && word[0] == 'E') {
    const size_t space = word.find(' ');
    const int code = std::atoi(word.c_str() + 1);
    return Fail(absl::Status(static_cast<absl::StatusCode>(code), word.substr(space + 1)), false);
  }
  return Fail(absl::InternalError("the launcher ended before it was ready"), false);
}

int RunUp(const UpFlags& flags) {
  LauncherOptions options = flags.launcher;
  options.security = flags.own.security;
  const std::pair<const std::string&, absl::Duration*> durations[] = {
      {flags.ready_timeout, &options.ready_timeout},
      {flags.drain_timeout, &options.drain_timeout},
      {flags.stop_timeout, &options.stop_timeout},
      {flags.silent_timeout, &options.silent_timeout}};
  for (const auto& [text, target] : durations) {
    if (!absl::ParseDuration(text, target) || *target <= absl::ZeroDuration()) {
      return Fail(absl::InvalidArgumentError(
                      absl::StrCat("\"", text, "\" is not a positive duration like 30s")),
                  false);
    }
  }
  for (const std::string& flag : options.server_flags) {
    // `ringattn down`, which waits for the coordinator, must know the timeout too.
    if (!absl::StartsWith(flag, "--drain_timeout")) continue;
    return Fail(absl::InvalidArgumentError("--server_flag=--drain_timeout: give --drain_timeout "
                                           "to `up` itself"),
                false);
  }
  for (const std::string& flag : options.server_flags) {
    if (!absl::StartsWith(flag, "--tls_cert") || !options.security.tls_ca.empty()) continue;
    return Fail(absl::InvalidArgumentError("--server_flag=--tls_cert needs --tls_ca for `up` too, "
                                           "which checks its coordinator's health"),
                false);
  }
  if (options.device == "cuda" && options.threads > 0) {
    return Fail(absl::InvalidArgumentError(
                    "--threads has no effect with --device=cuda; it configures CPU workers"),
                false);
  }
  return flags.detach ? RunDetached(options) : RunInForeground(options);
}

}  // namespace

void AddUp(FlagSet& program, Run& run) {
  auto flags = std::make_shared<UpFlags>();
  LauncherOptions& options = flags->launcher;
  options.state_dir = DefaultStateDir();
  FlagSet& command = program.AddCommand(
      "up",
      "Run a coordinator and workers on this machine. Restarts processes that exit, are stopped or "
      "do not answer. SIGTERM, Ctrl-C or `ringattn down` drains and ends all of them; a second "
      "signal ends them at once");
  command.Add("--workers", &options.workers, "Worker processes").InRange(1, 64).ShowDefault();
  command.Add("--device", &options.device, "Device of the workers")
      .OneOf({"auto", "cpu", "cuda"})
      .ShowDefault();
  command.Add("--port", &options.port, "gRPC port on 127.0.0.1; 0: any free port")
      .InRange(0, 65535)
      .ShowDefault();
  command
      .Add("--control_port", &options.control_port,
           "Port for workers and operators; 0: any free port")
      .InRange(0, 65535)
      .ShowDefault();
  command
      .Add("--metrics_port", &options.metrics_port,
           "Port of the live page and of /metrics; 0: any free port. The default gives way to a "
           "free "
           "port if it is taken")
      .InRange(0, 65535)
      .ShowDefault();
  command
      .Add("--threads", &options.threads,
           "Compute threads per CPU worker; 0: the cores divided by the workers")
      .InRange(0, 4096)
      .ShowDefault();
  command.Add("--detach", &flags->detach, "Return once the service is ready");
  command
      .Add("--local_memory", &options.local_memory,
           "host_memory: clients of this user may share host memory with the workers (sockets in "
           "state_dir); cuda_memory: also GPU memory with GPU workers; off: neither")
      .OneOf({"off", "host_memory", "cuda_memory"})
      .ShowDefault();
  command
      .Add("--direct", &options.direct,
           "Direct streams from clients of this machine to the workers. auto: on, unless "
           "--server_flag=--listen or TLS is given, for which workers need other flags "
           "(--worker_flag=--client_data_listen=...)")
      .OneOf({"auto", "on", "off"})
      .ShowDefault();
  command.Add("--state_dir", &options.state_dir, "Folder for process id, secret, ports and logs")
      .ShowDefault();
  command.Add(
      "--bin_dir", &options.bin_dir,
      "Folder of ringattn-server and ringattn-worker; default: $RINGATTN_BIN_DIR, or next to "
      "this program");
  command.Add("--server_flag", &options.server_flags,
              "A flag for the coordinator; may be repeated");
  command.Add("--worker_flag", &options.worker_flags,
              "A flag for every worker, such as --nccl_max_ctas=8; may be repeated");
  flags->own.AddSecurityTo(command);
  command
      .Add("--ready_timeout", &flags->ready_timeout,
           "Fail if the service is not ready after this long")
      .ShowDefault();
  command
      .Add("--drain_timeout", &flags->drain_timeout,
           "After a signal to end: requests in flight may continue for this long; new ones are "
           "rejected")
      .ShowDefault();
  command
      .Add("--stop_timeout", &flags->stop_timeout,
           "Kill processes that have not ended this long after that")
      .ShowDefault();
  command
      .Add("--silent_timeout", &flags->silent_timeout,
           "Replace a coordinator whose port has not answered for this long")
      .ShowDefault();
  command.OnChosen([flags, &run] { run = [flags] { return RunUp(*flags); }; });
}

}  // namespace ringattn::client::cli

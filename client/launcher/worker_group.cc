#include "client/launcher/worker_group.h"

#include <signal.h>
#include <sys/wait.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/launcher/child_process.h"
#include "client/launcher/health.h"
#include "client/launcher/launcher.h"
#include "client/launcher/supervisor.h"
#include "common/process/descriptors.h"
#include "common/security/credentials.h"
#include "common/wire/health_listener.h"

namespace ringattn::client {
namespace {

constexpr int kMaxPort = 65535;
constexpr int kExitBroken = 70;  // a broken device, which a restart may fix
constexpr absl::Duration kPollPause = absl::Milliseconds(200);
constexpr absl::Duration kHealthTimeout = absl::Seconds(1);
// The time that a worker may take beyond its --drain_timeout to free its resources.
constexpr absl::Duration kEndMargin = absl::Seconds(8);

// Returns the value of "--name=value"; false for other flags.
bool Matches(absl::string_view flag, absl::string_view name, absl::string_view* value) {
  *value = flag;
  return absl::ConsumePrefix(value, name) && absl::ConsumePrefix(value, "=");
}

// Splits "host:port"; false without a port.
bool SplitAddress(absl::string_view address, std::string* host, int* port) {
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos) return false;
  *host = std::string(address.substr(0, colon));
  return absl::SimpleAtoi(address.substr(colon + 1), port);
}

// Returns the address with its port increased by `index`; port 0 stays.
std::string Shifted(absl::string_view address, int index) {
  std::string host;
  int port = 0;
  if (!SplitAddress(address, &host, &port) || port == 0) return std::string(address);
  return absl::StrCat(host, ":", port + index);
}

std::string MemberHealth(absl::string_view group_health, int index) {
  std::string host;
  int port = 0;
  SplitAddress(group_health, &host, &port);
  return absl::StrCat("127.0.0.1:", port + 1 + index);
}

void LogLine(const std::string& line) {
  std::fprintf(stderr, "%s ringattn workers: %s\n",
               absl::FormatTime("%H:%M:%S", absl::Now(), absl::LocalTimeZone()).c_str(),
               line.c_str());
}

// Waits for a signal to end, the end of a child, or `pause`. Returns true after a signal to end.
bool WaitForSignal(absl::Duration pause) {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&signals, signal);
  const timespec timeout = absl::ToTimespec(pause);
  const int signal = sigtimedwait(&signals, nullptr, &timeout);
  return signal == SIGTERM || signal == SIGINT;
}

class Group {
 public:
  Group(const WorkerGroupOptions& options, const GroupFlags& flags, std::string program)
      : options_(options), flags_(flags), program_(std::move(program)), supervisor_({}, LogLine) {}

  absl::Status Run() {
    if (!flags_.health_listen.empty()) {
      auto health = wire::HealthListener::Start(flags_.health_listen);
      if (!health.ok()) return health.status();
      health_ = *std::move(health);
    }
    for (int index = 0; index < options_.count; ++index) {
      if (absl::Status status = Add(index); !status.ok()) return status;
    }
    while (!WaitForSignal(kPollPause)) {
      supervisor_.Poll();
      if (absl::Status status = CheckMembers(); !status.ok()) return status;
      TellHealth();
    }
    if (health_ != nullptr) health_->SetServing(wire::kReadinessName, false);
    LogLine("ending: requests on these workers may continue for " +
            absl::FormatDuration(flags_.drain_timeout) + "; a second signal ends them at once");
    bool hurried = false;
    supervisor_.EndAll(flags_.drain_timeout + kEndMargin,
                       [&] { return hurried = hurried || WaitForSignal(absl::ZeroDuration()); });
    return absl::OkStatus();
  }

  absl::Status CheckFlags() {
    for (int index = 0; index < options_.count; ++index) {
      auto pid = StartChild(Command(index), /*log_path=*/"");
      if (!pid.ok()) return pid.status();
      int status = 0;
      if (waitpid(*pid, &status, 0) == *pid && status == 0) continue;
      return absl::UnavailableError(absl::StrCat(Name(index), " ", DescribeExit(status)));
    }
    return absl::OkStatus();
  }

 private:
  static std::string Name(int index) { return absl::StrCat("worker ", index); }

  std::vector<std::string> Command(int index) const {
    std::vector<std::string> command = MemberFlags(options_.flags, index, options_.count);
    command.insert(command.begin(), program_);
    return command;
  }

  absl::Status Add(int index) {
    ChildSpec spec;
    spec.name = Name(index);
    spec.command = [this, index] { return Command(index); };
    if (health_ != nullptr) {
      // Any answer counts.
      spec.answers = [this, index] { return IsReady(index).ok(); };
    }
    return supervisor_.Add(std::move(spec));
  }

  absl::StatusOr<bool> IsReady(int index) const {
    return IsServing(MemberHealth(flags_.health_listen, index), TransportSecurity(),
                     kHealthTimeout);
  }

  void TellHealth() {
    if (health_ == nullptr) return;
    bool ready = true;
    for (int index = 0; ready && index < options_.count; ++index) {
      const absl::StatusOr<bool> member = IsReady(index);
      ready = member.ok() && *member;
    }
    health_->SetServing(wire::kReadinessName, ready);
  }

  // Workers are restarted after a signal, a dismissal by the coordinator (0) or a broken device.
  // Any other exit is about the flags or the machine and would repeat.
  absl::Status CheckMembers() const {
    for (int index = 0; index < options_.count; ++index) {
      if (supervisor_.exit_count(Name(index)) == 0) continue;
      const int exit = supervisor_.last_exit(Name(index));
      if (!WIFEXITED(exit) || WEXITSTATUS(exit) == 0 || WEXITSTATUS(exit) == kExitBroken) continue;
      return absl::UnavailableError(
          absl::StrCat(Name(index), " cannot start: it ", DescribeExit(exit)));
    }
    return absl::OkStatus();
  }

  const WorkerGroupOptions options_;
  const GroupFlags flags_;
  const std::string program_;
  std::unique_ptr<wire::HealthListener> health_;
  Supervisor supervisor_;
};

}  // namespace

absl::StatusOr<GroupFlags> ReadGroupFlags(const std::vector<std::string>& flags, int count) {
  GroupFlags read;
  for (const std::string& flag : flags) {
    absl::string_view value;
    if (flag == "--check_flags") {
      read.check_flags = true;
    } else if (!absl::StartsWith(flag, "--")) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", flag, "\": worker flags have the form --name=value"));
    } else if (Matches(flag, "--local_workers", &value) || Matches(flag, "--local_rank", &value) ||
               Matches(flag, "--port_file", &value)) {
      return absl::InvalidArgumentError(absl::StrCat(flag, ": the group sets it for each worker"));
    } else if (Matches(flag, "--drain_timeout", &value)) {
      if (!absl::ParseDuration(value, &read.drain_timeout)) {
        return absl::InvalidArgumentError(absl::StrCat(flag, ": not a duration like 30s"));
      }
    } else if (Matches(flag, "--health_listen", &value)) {
      std::string host;
      int port = 0;
      if (!SplitAddress(value, &host, &port) || port <= 0 || port + count > kMaxPort) {
        return absl::InvalidArgumentError(absl::StrCat(flag, ": give a port; the ", count,
                                                       " ports after it are for the workers"));
      }
      read.health_listen = std::string(value);
    }
  }
  return read;
}

std::vector<std::string> MemberFlags(const std::vector<std::string>& flags, int index, int count) {
  std::vector<std::string> own;
  bool has_device = false;
  for (const std::string& flag : flags) {
    absl::string_view value;
    if (Matches(flag, "--name", &value)) {
      own.push_back(absl::StrCat(flag, "-", index));
    } else if (Matches(flag, "--data_listen", &value)) {
      own.push_back(absl::StrCat("--data_listen=", Shifted(value, index)));
    } else if (Matches(flag, "--client_data_listen", &value)) {
      own.push_back(absl::StrCat("--client_data_listen=", Shifted(value, index)));
    } else if (Matches(flag, "--client_data_address", &value)) {
      own.push_back(absl::StrCat("--client_data_address=", Shifted(value, index)));
    } else if (Matches(flag, "--metrics_listen", &value)) {
      own.push_back(absl::StrCat("--metrics_listen=", Shifted(value, index)));
    } else if (Matches(flag, "--health_listen", &value)) {
      own.push_back(absl::StrCat("--health_listen=", MemberHealth(value, index)));
    } else {
      has_device = has_device || Matches(flag, "--device", &value);
      own.push_back(flag);
    }
  }
  if (!has_device) own.push_back(absl::StrCat("--device=cuda:", index));
  own.push_back(absl::StrCat("--local_workers=", count));
  own.push_back(absl::StrCat("--local_rank=", index));
  return own;
}

absl::Status RunWorkerGroup(const WorkerGroupOptions& options) {
  const absl::StatusOr<GroupFlags> flags = ReadGroupFlags(options.flags, options.count);
  if (!flags.ok()) return flags.status();
  const absl::StatusOr<Binaries> binaries = FindBinaries(options.bin_dir);
  if (!binaries.ok()) return binaries.status();
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  RaiseDescriptorLimit();
  Group group(options, *flags, binaries->worker);
  return flags->check_flags ? group.CheckFlags() : group.Run();
}

}  // namespace ringattn::client

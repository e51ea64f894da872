#include "client/launcher/launcher.h"

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/api/client.h"
#include "client/call/client_security.h"
#include "client/launcher/child_process.h"
#include "client/launcher/health.h"
#include "client/launcher/worker_device.h"
#include "common/base/monotonic_time.h"
#include "common/process/descriptors.h"
#include "common/process/listener_probe.h"
#include "nlohmann/json.hpp"

namespace ringattn::client {
namespace {

constexpr char kServerName[] = "ringattn-server";
constexpr char kWorkerName[] = "ringattn-worker";
constexpr char kPortFile[] = "server.json";
constexpr absl::Duration kPollPause = absl::Milliseconds(200);
constexpr absl::Duration kProbeTimeout = absl::Seconds(1);
constexpr absl::Duration kEndMargin = absl::Seconds(5);

sigset_t EndingSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&signals, signal);
  return signals;
}

sigset_t WatchedSignals() {
  sigset_t signals = EndingSignals();
  sigaddset(&signals, SIGCHLD);
  return signals;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string TailOf(const std::string& path) {
  constexpr size_t kBytes = 2000;
  const std::string text = ReadFile(path);
  return text.size() <= kBytes ? text : text.substr(text.size() - kBytes);
}

std::string WorkerChild(int index) { return absl::StrCat("worker-", index); }

// Reads the coordinator's port file: {"listen": "h:p", "control": "h:p", "metrics": "h:p"}.
bool ReadPorts(const std::string& path, std::string* listen, std::string* control,
               std::string* metrics) {
  const auto json = nlohmann::json::parse(ReadFile(path), nullptr, false);
  if (!json.is_object()) return false;
  const std::pair<const char*, std::string*> fields[] = {
      {"listen", listen}, {"control", control}, {"metrics", metrics}};
  for (const auto& [name, target] : fields) {
    if (!json.contains(name) || !json[name].is_string()) return false;
    *target = json[name].get<std::string>();
  }
  return true;
}

bool IsFreeOnLoopback(int port) {
  const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return true;  // the server reports what is wrong
  const int on = 1;
  setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool free = bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(descriptor);
  return free;
}

int MetricsPort(const LauncherOptions& options) {
  const int port = options.metrics_port;
  return port == kDefaultMetricsPort && !IsFreeOnLoopback(port) ? 0 : port;
}

void LogLine(const std::string& line) {
  std::fprintf(stderr, "%s ringattn up: %s\n",
               absl::FormatTime("%H:%M:%S", absl::Now(), absl::LocalTimeZone()).c_str(),
               line.c_str());
}

}  // namespace

absl::StatusOr<Binaries> FindBinaries(const std::string& bin_dir) {
  namespace fs = std::filesystem;
  std::vector<fs::path> folders;
  const char* from_environment = std::getenv("RINGATTN_BIN_DIR");
  if (!bin_dir.empty()) {
    folders.push_back(bin_dir);
  } else if (from_environment != nullptr && from_environment[0] != '\0') {
    folders.push_back(from_environment);
  } else {
    std::error_code error;
    const fs::path self = fs::read_symlink("/proc/self/exe", error);
    if (error) return absl::InternalError("/proc/self/exe: " + error.message());
    folders = {self.parent_path(), self.parent_path().parent_path()};
  }
  const auto executable = [](const fs::path& path) { return access(path.c_str(), X_OK) == 0; };
  std::vector<std::string> looked_at;
  for (const fs::path& folder : folders) {
    const std::pair<fs::path, fs::path> layouts[] = {
        {folder / kServerName, folder / kWorkerName},
        {folder / "server" / kServerName, folder / "worker" / kWorkerName}};
    for (const auto& [server, worker] : layouts) {
      if (executable(server) && executable(worker)) return Binaries{server, worker};
      looked_at.push_back(server.parent_path().string());
    }
  }
  return absl::NotFoundError(absl::StrCat("no ", kServerName, " and ", kWorkerName, " in ",
                                          absl::StrJoin(looked_at, ", "),
                                          "; name their folder with --bin_dir"));
}

Launcher::Launcher(const LauncherOptions& options, const Binaries& binaries, StateDir state)
    : options_(options),
      binaries_(binaries),
      state_(std::move(state)),
      supervisor_({.silent_max = options.silent_timeout}, LogLine) {}

absl::StatusOr<std::unique_ptr<Launcher>> Launcher::Start(const LauncherOptions& options) {
  const sigset_t signals = WatchedSignals();
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  RaiseDescriptorLimit();
  auto binaries = FindBinaries(options.bin_dir);
  if (!binaries.ok()) return binaries.status();
  auto state = StateDir::Acquire(options.state_dir);
  if (!state.ok()) return state.status();
  std::unique_ptr<Launcher> launcher(new Launcher(options, *binaries, *std::move(state)));
  auto secret = launcher->state_.WriteSecret();
  if (!secret.ok()) return secret.status();
  // `down` waits this long before it kills.
  absl::Status status =
      launcher->state_.WriteEndTimeout(options.drain_timeout + options.stop_timeout + kEndMargin);
  if (!status.ok()) return status;
  launcher->secret_file_ = *secret;
  if (status = launcher->StartServer(); !status.ok()) return status;
  if (status = launcher->StartWorkers(); !status.ok()) return status;
  return launcher;
}

std::vector<std::string> Launcher::ServerCommand() const {
  const auto listen = [](const std::string& known, int port) {
    return known.empty() ? absl::StrCat("127.0.0.1:", port) : known;
  };
  std::vector<std::string> command = {
      binaries_.server,
      absl::StrCat("--listen=", listen(address_, options_.port)),
      absl::StrCat("--control_listen=", listen(control_address_, options_.control_port)),
      absl::StrCat("--metrics_listen=", listen(metrics_address_, MetricsPort(options_))),
      absl::StrCat("--secret_file=", secret_file_),
      absl::StrCat("--port_file=", state_.File(kPortFile)),
      absl::StrCat("--drain_timeout=", absl::FormatDuration(options_.drain_timeout))};
  command.insert(command.end(), options_.server_flags.begin(), options_.server_flags.end());
  return command;
}

std::vector<std::string> Launcher::WorkerCommand(int index) const {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const int threads = options_.threads > 0 ? options_.threads : cores / options_.workers;
  std::vector<std::string> command = {
      binaries_.worker,
      absl::StrCat("--coordinator=", control_address_),
      absl::StrCat("--secret_file=", secret_file_),
      absl::StrCat("--name=", WorkerChild(index)),
      absl::StrCat("--device=", WorkerDevice(options_.device, index)),
      absl::StrCat("--local_workers=", options_.workers),
      absl::StrCat("--local_rank=", index),
      "--data_listen=127.0.0.1:0",
      "--metrics_listen=127.0.0.1:0",
      "--ring_address=127.0.0.1"};
  // GPU workers have no compute threads and reject the flag.
  if (options_.device != "cuda") {
    command.push_back(absl::StrCat("--threads=", std::max(1, threads)));
  }
  if (options_.local_memory != "off") {
    command.push_back(absl::StrCat("--local_memory=", options_.local_memory));
    command.push_back(absl::StrCat("--local_socket_dir=",
                                   std::filesystem::absolute(options_.state_dir).string()));
  }
  if (WorkersListenForClients()) command.push_back("--client_data_listen=127.0.0.1:0");
  command.insert(command.end(), options_.worker_flags.begin(), options_.worker_flags.end());
  return command;
}

// Clients on other machines would dial themselves, and clients that use TLS expect it here too.
// --worker_flag configures these cases.
bool Launcher::WorkersListenForClients() const {
  const auto has = [](const std::vector<std::string>& flags, absl::string_view flag) {
    return std::any_of(flags.begin(), flags.end(),
                       [flag](const std::string& given) { return absl::StartsWith(given, flag); });
  };
  if (has(options_.worker_flags, "--client_data_listen")) return false;
  if (options_.direct != "auto") return options_.direct == "on";
  return !has(options_.server_flags, "--listen") && options_.security.tls_ca.empty();
}

absl::Status Launcher::StartServer() {
  const std::string port_file = state_.File(kPortFile);
  unlink(port_file.c_str());
  const std::string log = state_.File("server.log");
  const int metrics_port = MetricsPort(options_);
  const ListenerProtocol speech =
      options_.security.tls_ca.empty() ? ListenerProtocol::kPlainText : ListenerProtocol::kTls;
  absl::Status status = supervisor_.Add(
      {.name = kServerName,
       .command = [this] { return ServerCommand(); },
       .log_path = log,
       .answers =
           [this, speech] {
             return address_.empty() || ProbeListener(address_, kProbeTimeout, speech).ok();
           }});
  if (!status.ok()) return status;
  const absl::Time end = MonotonicNow() + options_.ready_timeout;
  while (!ReadPorts(port_file, &address_, &control_address_, &metrics_address_)) {
    if (WaitForSignal(absl::Milliseconds(20))) return absl::CancelledError("ended by a signal");
    supervisor_.Poll();
    // We have just started it. If it exits, it will exit again; most likely its port is taken.
    // Another service may take the default metrics port at the same moment; the restart avoids it.
    const int exits_allowed =
        metrics_port == kDefaultMetricsPort && MetricsPort(options_) == 0 ? 1 : 0;
    if (supervisor_.exit_count(kServerName) > exits_allowed || MonotonicNow() > end) {
      return absl::UnavailableError(absl::StrCat(
          "the coordinator did not start; its log ends with:\n",
          supervisor_.exit_count(kServerName) > 0 ? supervisor_.last_output(kServerName)
                                                  : TailOf(log)));
    }
  }
  return absl::OkStatus();
}

absl::Status Launcher::StartWorkers() {
  for (int index = 0; index < options_.workers; ++index) {
    absl::Status status =
        supervisor_.Add({.name = WorkerChild(index),
                         .command = [this, index] { return WorkerCommand(index); },
                         .log_path = state_.File(WorkerChild(index) + ".log")});
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// A restart may help after a broken device (70), a signal, or a worker that the coordinator
// dismissed (0). Any other exit before the worker has served is about its flags or its machine.
absl::Status Launcher::CheckWorkers() const {
  constexpr int kExitBroken = 70;
  for (int index = 0; index < options_.workers; ++index) {
    const std::string name = WorkerChild(index);
    if (supervisor_.exit_count(name) == 0) continue;
    const int exit = supervisor_.last_exit(name);
    if (exit == 0 || !WIFEXITED(exit) || WEXITSTATUS(exit) == kExitBroken) continue;
    return absl::UnavailableError(absl::StrCat(name, " cannot start: it ", DescribeExit(exit),
                                               "; its log ends with:\n",
                                               supervisor_.last_output(name)));
  }
  return absl::OkStatus();
}

absl::Status Launcher::WaitUntilReady() {
  ClientOptions client_options = options_.security;
  client_options.channels = 1;
  auto client = Client::Connect(address_, client_options);
  if (!client.ok()) return client.status();
  const auto security = SecurityOf(options_.security);
  if (!security.ok()) return security.status();
  const absl::Time end = MonotonicNow() + options_.ready_timeout;
  std::string seen = "no answer yet";
  while (MonotonicNow() < end) {
    if (WaitForSignal(absl::Milliseconds(50))) return absl::CancelledError("ended by a signal");
    supervisor_.Poll();
    if (absl::Status status = CheckWorkers(); !status.ok()) return status;
    const auto topology = (*client)->GetTopology(absl::Seconds(2));
    if (!topology.ok()) {
      seen = std::string(topology.status().message());
      continue;
    }
    const int members = static_cast<int>(
        std::count_if(topology->workers().begin(), topology->workers().end(),
                      [](const v1::WorkerInfo& worker) { return worker.has_rank(); }));
    seen = absl::StrCat(members, " of ", options_.workers, " workers in the ring");
    if (topology->state() != v1::RING_STATE_READY || members < options_.workers) continue;
    const auto serving = IsServing(address_, *security, absl::Seconds(2));
    if (serving.ok() && *serving) return absl::OkStatus();
    seen = serving.ok() ? "health says NOT_SERVING" : std::string(serving.status().message());
  }
  return absl::UnavailableError(absl::StrCat("not ready after ",
                                             absl::FormatDuration(options_.ready_timeout), ": ",
                                             seen, "; logs are in ", state_.path()));
}

bool Launcher::WaitForSignal(absl::Duration pause) {
  const sigset_t signals = WatchedSignals();
  const sigset_t ending = EndingSignals();
  const timespec timeout = absl::ToTimespec(pause);
  const int signal = sigtimedwait(&signals, nullptr, &timeout);
  return signal > 0 && sigismember(&ending, signal) == 1;
}

void Launcher::Run() {
  while (!WaitForSignal(kPollPause)) supervisor_.Poll();
  LogLine(absl::StrCat("ending: requests in flight may continue for ",
                       absl::FormatDuration(options_.drain_timeout),
                       "; a second signal ends them at once"));
  bool hurried = false;
  const auto hurry = [&] { return hurried = hurried || WaitForSignal(absl::ZeroDuration()); };
  // End the coordinator first: it finishes requests in flight, for which it needs the workers. It
  // gets half of the time after draining, and the workers the other half.
  supervisor_.End({kServerName}, options_.drain_timeout + options_.stop_timeout / 2, hurry);
  supervisor_.EndAll(options_.stop_timeout / 2, hurry);
}

}  // namespace ringattn::client

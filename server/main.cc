// ringattn-server: the coordinator process.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/base/version.h"
#include "common/observability/log.h"
#include "common/process/descriptors.h"
#include "common/process/secret_file.h"
#include "common/wire/allocator.h"
#include "common/wire/grpc_1_51/callback_threads.h"
#include "common/wire/grpc_1_51/grpc_lifetime.h"
#include "common/wire/grpc_1_51/resting_threads.h"
#include "common/wire/grpc_log.h"
#include "server/edge/server.h"
#include "server/options.h"
#include "server/port_file.h"

namespace ringattn::server {
namespace {

// Exit code for supervisors to restart the process (sysexits.h: EX_OSERR).
constexpr int kExitDeaf = 71;

// Configuration errors and transient errors have different exit codes.
int Die(const absl::Status& status) {
  std::fprintf(stderr, "ringattn-server: %s\n", std::string(status.message()).c_str());
  return absl::IsInvalidArgument(status) ? kUsageExitCode : 1;
}

int Run(int argc, char** argv) {
  CommandLine line = ParseCommandLine(argc, argv);
  absl::StatusOr<std::string> secret = ReadSecretFile(line.secret_file);
  if (!secret.ok()) return Die(secret.status());
  if (line.check_flags) return 0;
  wire::SetCallbackThreads(line.callback_threads);

  // Blocked in every thread, so that sigwait below receives them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);

  InitLogging("ringattn-server", line.log_level);
  wire::LogForGrpc();
  line.server.secret = *std::move(secret);
  line.server.core.version = kVersion;
  // Milliseconds exceed every generation of an earlier process, because rings do not form a
  // thousand times per second.
  line.server.core.initial_generation = static_cast<uint64_t>(absl::ToUnixMillis(absl::Now()));
  line.server.on_dead = [] {
    ShutdownLogging();
    _exit(kExitDeaf);
  };
  wire::KeepGrpcRunning();
  const wire::RestingThreads resting(line.callback_threads - wire::ServingCallbackThreads());
  if (absl::Status status = OpenSecurity(&line); !status.ok()) return Die(status);
  const ServerOptions options = line.server;
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(std::move(line.server));
  if (!server.ok()) return Die(server.status());
  const ServerAddresses& addresses = (*server)->addresses();
  if (absl::Status status = WritePortFile(line.port_file, options, addresses); !status.ok()) {
    return Die(status);
  }
  LogInfo("serving", {{"version", kVersion},
                      {"listen", addresses.listen},
                      {"control", addresses.control},
                      {"metrics", addresses.metrics},
                      {"health", addresses.health}});

  int signal_number = 0;
  sigwait(&signals, &signal_number);
  LogInfo("draining", {{"signal", signal_number},
                       {"drain_timeout_seconds", absl::ToDoubleSeconds(line.drain_timeout)}});
  std::thread([signals] {
    int second = 0;
    sigwait(&signals, &second);
    _exit(128 + second);
  }).detach();
  const bool drained = (*server)->Shutdown(line.drain_timeout);
  LogInfo("stopped", {{"drained", drained}});
  server->reset();
  ShutdownLogging();
  // Static destructors must not run concurrently with gRPC's threads.
  _exit(0);
}

}  // namespace
}  // namespace ringattn::server

int main(int argc, char** argv) {
  ringattn::wire::KeepFreedMemory();
  // The distribution's Abseil searches for lock cycles at each acquisition, also in gRPC, which
  // took 9% of the processor time per small request. Tests still do it.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  ringattn::RaiseDescriptorLimit();
  return ringattn::server::Run(argc, argv);
}

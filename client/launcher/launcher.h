// `ringattn up`: a coordinator and its workers as child processes on this machine.
// Tests: tests/e2e/test_service.py, test_tools.py.
#ifndef RINGATTN_CLIENT_LAUNCHER_LAUNCHER_H_
#define RINGATTN_CLIENT_LAUNCHER_LAUNCHER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/api/client.h"
#include "client/launcher/state_dir.h"
#include "client/launcher/supervisor.h"

namespace ringattn::client {

inline constexpr int kDefaultMetricsPort = 7702;

struct LauncherOptions {
  int workers = 4;
  std::string device = "auto";
  int port = 7700;  // 0: any free port, here and below
  int control_port = 0;
  // Metrics and live page. The default gives way to any free port if it is taken.
  int metrics_port = kDefaultMetricsPort;
  int threads = 0;  // per worker; 0: the machine's cores divided by the workers
  std::string state_dir;
  std::string local_memory =
      "host_memory";  // of the workers: off, host_memory or cuda_memory; sockets lie in state_dir
  // Direct streams: on, off, or auto, which means on if the coordinator speaks plain text and its
  // clients are on this machine.
  std::string direct = "auto";
  std::string bin_dir;                    // empty: see FindBinaries
  std::vector<std::string> server_flags;  // passed on unchanged
  std::vector<std::string> worker_flags;
  // How the launcher itself connects to the coordinator: the tls_ fields and token_file.
  ClientOptions security;
  absl::Duration ready_timeout = absl::Seconds(60);
  // After a signal to end, requests in flight may continue for this long (the coordinator's
  // --drain_timeout). Then all processes together have stop_timeout to end.
  absl::Duration drain_timeout = absl::Seconds(30);
  absl::Duration stop_timeout = absl::Seconds(10);
  // The launcher replaces a coordinator whose port has not answered for this long.
  absl::Duration silent_timeout = absl::Seconds(40);
};

struct Binaries {
  std::string server;
  std::string worker;
};

// Looks in `bin_dir`, in $RINGATTN_BIN_DIR, next to this program, and where Bazel puts them.
// Errors: NOT_FOUND with the places searched.
absl::StatusOr<Binaries> FindBinaries(const std::string& bin_dir);

// Not thread safe. All calls must be from the main thread.
class Launcher {
 public:
  // Blocks SIGTERM, SIGINT and SIGCHLD in this thread and in threads created later, so that Run can
  // wait for them. Starts the coordinator, waits for its ports, and starts the workers. Errors:
  // FAILED_PRECONDITION if a launcher already runs in the state folder; UNAVAILABLE with the end of
  // the log if the coordinator does not start.
  static absl::StatusOr<std::unique_ptr<Launcher>> Start(const LauncherOptions& options);

  // Waits until the service is healthy and every worker is in the ring. Errors: UNAVAILABLE after
  // ready_timeout, or with the end of a worker's log if the worker cannot start; CANCELLED after a
  // signal to end.
  absl::Status WaitUntilReady();

  // Supervises until SIGTERM or SIGINT, then ends everything: the coordinator drains, and the
  // workers end after it. A second signal ends all at once.
  void Run();

  const std::string& address() const { return address_; }
  const std::string& metrics_address() const { return metrics_address_; }
  const std::string& log_dir() const { return state_.path(); }

 private:
  Launcher(const LauncherOptions& options, const Binaries& binaries, StateDir state);

  absl::Status StartServer();
  absl::Status StartWorkers();
  // Returns an error if a worker has exited for a reason that a restart does not fix.
  absl::Status CheckWorkers() const;
  std::vector<std::string> ServerCommand() const;
  std::vector<std::string> WorkerCommand(int index) const;
  bool WorkersListenForClients() const;
  // Waits for a signal to end, the end of a child, or `pause`. Returns true after a signal to end.
  bool WaitForSignal(absl::Duration pause);

  const LauncherOptions options_;
  const Binaries binaries_;
  const StateDir state_;
  std::string secret_file_;
  Supervisor supervisor_;
  // Known once the coordinator has bound its ports; a restarted one gets the same.
  std::string address_;
  std::string control_address_;
  std::string metrics_address_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_LAUNCHER_H_

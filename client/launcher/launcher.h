// `ringattn up`: a coordinator and its workers as child processes on this machine.
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

struct LauncherOptions {
  int workers = 4;
  std::string device = "auto";
  int port = 7700;  // 0: any free one, here and below
  int control_port = 0;
  int metrics_port = 0;
  int threads = 0;  // per worker; 0: the machine's cores divided by the workers
  std::string state_dir;
  std::string local_memory =
      "host_memory";  // of the workers: off, host_memory, cuda_memory; sockets lie in state_dir
  // Of the workers: on, off, or auto: where their clients are of this machine and the coordinator
  // speaks plain text.
  std::string direct = "auto";
  std::string bin_dir;                    // empty: see FindBinaries
  std::vector<std::string> server_flags;  // passed on as they are
  std::vector<std::string> worker_flags;
  // How the launcher itself gets through to the coordinator: the tls_ fields and token_file.
  ClientOptions security;
  absl::Duration ready_timeout = absl::Seconds(60);
  // Told to end, requests in flight may go on for this long (the coordinator's
  // --drain_timeout); after it all processes together have stop_timeout to end.
  absl::Duration drain_timeout = absl::Seconds(30);
  absl::Duration stop_timeout = absl::Seconds(10);
  // A coordinator whose port has not answered for this long is replaced.
  absl::Duration silent_timeout = absl::Seconds(40);
};

struct Binaries {
  std::string server;
  std::string worker;
};

// In `bin_dir`, $RINGATTN_BIN_DIR, beside this program, or as Bazel lays them out
// around it. Errors: NOT_FOUND with the places looked at.
absl::StatusOr<Binaries> FindBinaries(const std::string& bin_dir);

// Not thread safe; all calls from the main thread.
class Launcher {
 public:
  // Blocks SIGTERM, SIGINT and SIGCHLD in this thread and those made later, so that
  // Run can wait for them. Starts the coordinator and waits for its ports, then the
  // workers. Errors: FAILED_PRECONDITION if one runs in the state folder already;
  // UNAVAILABLE with the end of its log if the coordinator does not come up.
  static absl::StatusOr<std::unique_ptr<Launcher>> Start(const LauncherOptions& options);

  // Until the service is healthy and every worker is in the ring.
  // Errors: UNAVAILABLE after ready_timeout, or with a worker's last words once it ends
  // because it cannot start; CANCELLED if told to end meanwhile.
  absl::Status WaitUntilReady();

  // Supervises until SIGTERM or SIGINT, then ends everything: the coordinator drains, the
  // workers end after it. A second signal ends all at once.
  void Run();

  const std::string& address() const { return address_; }
  const std::string& metrics_address() const { return metrics_address_; }
  const std::string& log_dir() const { return state_.path(); }

 private:
  Launcher(const LauncherOptions& options, const Binaries& binaries, StateDir state);

  absl::Status StartServer();
  absl::Status StartWorkers();
  // Not OK if one has ended that will end again.
  absl::Status CheckWorkers() const;
  std::vector<std::string> ServerCommand() const;
  std::vector<std::string> WorkerCommand(int index) const;
  bool WorkersListenForClients() const;
  // Waits for a signal that ends us, a child's end, or `pause`. True: we are to end.
  bool WaitForSignal(absl::Duration pause);

  const LauncherOptions options_;
  const Binaries binaries_;
  const StateDir state_;
  std::string secret_file_;
  Supervisor supervisor_;
  // Known once the coordinator has bound them; a restarted one gets the same.
  std::string address_;
  std::string control_address_;
  std::string metrics_address_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_LAUNCHER_LAUNCHER_H_

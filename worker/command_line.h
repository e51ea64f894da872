// The command line of ringattn-worker.
#ifndef RINGATTN_WORKER_COMMAND_LINE_H_
#define RINGATTN_WORKER_COMMAND_LINE_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/observability/log.h"
#include "common/process/cluster_tls.h"
#include "common/security/credentials.h"
#include "worker/backend.h"
#include "worker/faults/fault_injection.h"
#include "worker/service/worker.h"

namespace ringattn::worker {

struct CommandLine {
  WorkerOptions
      worker;  // complete except for measurements, security and what the device determines
  BackendOptions backend;
  std::string port_file;
  ClusterTlsFlags cluster_tls;
  TlsFiles client_tls;  // for --client_data_listen
  bool insecure = false;
  std::optional<FaultPlan> faults;
  LogLevel log_level = LogLevel::kInfo;
  absl::Duration drain_timeout = absl::Seconds(30);
  std::optional<int> kv_spin_us;  // unset: KvSpin's default
  int cores = 1;                  // that this process may use
  bool check_flags = false;       // only check the flags, then exit
};

inline constexpr int kUsageExitCode = 2;  // as for the command line; docs/cli-json.md

// Parses the command line, determines defaults (threads, memory limit) from the machine, and reads
// the secret. Exits the process after --help, --version and errors.
CommandLine ParseCommandLine(int argc, char** argv);

// Returns how long the threads of step rings wait actively. By default they do if the machine has
// two processor cores for each worker, one for the ring and one for its client, in addition to a
// CPU worker's compute threads. `computes_on_cores`: the device is a CPU.
absl::Duration KvSpin(const CommandLine& line, bool computes_on_cores);

// Returns the security for client_tls; plain text without certificate flags. Returns the errors of
// TransportSecurity::Tls.
absl::StatusOr<TransportSecurity> OpenClientSecurity(const CommandLine& line);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMMAND_LINE_H_

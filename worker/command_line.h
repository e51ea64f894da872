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
  WorkerOptions worker;  // complete but for what is measured, protects or the device decides
  BackendOptions backend;
  std::string port_file;
  ClusterTlsFlags cluster_tls;
  TlsFiles client_tls;  // of --client_data_listen
  bool insecure = false;
  std::optional<FaultPlan> faults;
  LogLevel log_level = LogLevel::kInfo;
  absl::Duration drain_timeout = absl::Seconds(30);
  bool check_flags = false;  // that is all there is to do
};

inline constexpr int kUsageExitCode = 2;  // as of the command line, docs/cli-json.md

// Resolves defaults (threads, memory limit) from the machine and reads the secret.
// Exits the process, as command lines do, after --help, --version and mistakes.
CommandLine ParseCommandLine(int argc, char** argv);

// What --client_tls_cert and its kin say; plain text without them. Errors: as
// TransportSecurity::Tls.
absl::StatusOr<TransportSecurity> OpenClientSecurity(const CommandLine& line);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMMAND_LINE_H_

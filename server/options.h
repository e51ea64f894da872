// The command line of ringattn-server.
#ifndef RINGATTN_SERVER_OPTIONS_H_
#define RINGATTN_SERVER_OPTIONS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/observability/log.h"
#include "common/process/cluster_tls.h"
#include "common/security/tls_material.h"
#include "common/wire/grpc_1_51/callback_threads.h"
#include "server/edge/server.h"

namespace ringattn::server {

struct CommandLine {
  ServerOptions server;  // without the secret and transport security
  std::string secret_file;
  TlsFiles client_tls;  // empty certificate: plain text
  ClusterTlsFlags cluster_tls;
  bool insecure = false;
  std::string port_file;
  absl::Duration drain_timeout = absl::Seconds(30);
  int callback_threads = wire::DefaultCallbackThreads();
  LogLevel log_level = LogLevel::kInfo;
  bool check_flags = false;  // check the flags and exit
};

inline constexpr int kUsageExitCode = 2;  // command-line error, docs/cli-json.md

// Exits the process after --help, --version and errors.
CommandLine ParseCommandLine(int argc, char** argv);

// Opens the TLS files into line->server. Starts threads. Returns INVALID_ARGUMENT, naming the flag
// and the file.
absl::Status OpenSecurity(CommandLine* line);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_OPTIONS_H_

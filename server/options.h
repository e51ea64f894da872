// The command line of ringattn-server.
#ifndef RINGATTN_SERVER_OPTIONS_H_
#define RINGATTN_SERVER_OPTIONS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/observability/log.h"
#include "server/edge/server.h"

namespace ringattn::server {

struct CommandLine {
  ServerOptions server;  // without the secret
  std::string secret_file;
  std::string port_file;
  absl::Duration drain_timeout = absl::Seconds(30);
  LogLevel log_level = LogLevel::kInfo;
  bool check_flags = false;  // that is all there is to do
};

// Exits the process, as command lines do, after --help, --version and mistakes.
CommandLine ParseCommandLine(int argc, char** argv);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_OPTIONS_H_

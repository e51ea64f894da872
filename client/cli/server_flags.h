// The flags of commands that call a service: its address and the security settings.
#ifndef RINGATTN_CLIENT_CLI_SERVER_FLAGS_H_
#define RINGATTN_CLIENT_CLI_SERVER_FLAGS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/api/client.h"
#include "client/cli/flag_set.h"

namespace ringattn::client::cli {

struct ServerFlags {
  std::string server;
  ClientOptions security;  // only the fields of the flags below

  // Adds --server, which is required, and the security flags.
  void AddTo(FlagSet& command);
  // Adds --tls_ca, --tls_cert, --tls_key, --tls_server_name and --token_file.
  void AddSecurityTo(FlagSet& command);
  // Connects with `options` and the flags. Errors: Client::Connect's, as a UsageError.
  absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options) const;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_SERVER_FLAGS_H_

// The flags of commands that talk to a service: where it is, and how to get through to it.
#ifndef RINGATTN_CLIENT_CLI_SERVER_FLAGS_H_
#define RINGATTN_CLIENT_CLI_SERVER_FLAGS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/api/client.h"

namespace CLI {
class App;
}

namespace ringattn::client::cli {

struct ServerFlags {
  std::string server;
  ClientOptions security;  // the fields of the flags below

  // --server, which is required, and the others.
  void AddTo(CLI::App* command);
  // --tls_ca, --tls_cert, --tls_key, --tls_server_name, --token_file.
  void AddSecurityTo(CLI::App* command);
  // `options` with what the flags say. Errors: Client::Connect's, as UsageError.
  absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options) const;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_SERVER_FLAGS_H_

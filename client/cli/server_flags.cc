#include "client/cli/server_flags.h"

#include "client/cli/command.h"
#include "client/cli/flag_set.h"

namespace ringattn::client::cli {

void ServerFlags::AddTo(FlagSet& command) {
  command.Add("--server", &server, "The service's gRPC address, host:port").Required();
  AddSecurityTo(command);
}

void ServerFlags::AddSecurityTo(FlagSet& command) {
  const char* group = "Security (docs/security.md)";
  const auto file = [&](const char* name, std::string* target, const char* help) {
    command.Add(name, target, help).ValueName("FILE").Group(group);
  };
  file("--tls_ca", &security.tls_ca,
       "Use TLS; PEM file of the authorities that sign the server's certificate");
  file("--tls_cert", &security.tls_cert,
       "PEM file of the client's certificate; requires --tls_key");
  file("--tls_key", &security.tls_key, "PEM file of its private key, without a pass phrase");
  command
      .Add("--tls_server_name", &security.tls_server_name,
           "The name in the server's certificate; default: --server's host")
      .ValueName("NAME")
      .Group(group);
  file("--token_file", &security.token_file, "File with a bearer token to send with every call");
}

absl::StatusOr<std::unique_ptr<Client>> ServerFlags::Connect(const ClientOptions& options) const {
  ClientOptions all = options;
  all.tls_ca = security.tls_ca;
  all.tls_cert = security.tls_cert;
  all.tls_key = security.tls_key;
  all.tls_server_name = security.tls_server_name;
  all.token_file = security.token_file;
  auto client = Client::Connect(server, all);
  if (!client.ok()) return UsageError(client.status().message());
  return client;
}

}  // namespace ringattn::client::cli

// The flags that protect the communication between coordinator and workers.
#ifndef RINGATTN_COMMON_PROCESS_CLUSTER_TLS_H_
#define RINGATTN_COMMON_PROCESS_CLUSTER_TLS_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/security/credentials.h"

namespace CLI {
class App;
}

namespace ringattn {

struct ClusterTlsFlags {
  TlsFiles files;
  std::string server_name;

  // Adds --cluster_tls_cert, _key, _ca and _server_name.
  void AddTo(CLI::App* app);
  bool given() const { return !files.certificate.empty(); }
  // Returns INVALID_ARGUMENT, naming the flag, unless all three files are given or none of the four
  // flags.
  absl::Status Check() const;
  // Opens mutual TLS, or plain text if no file is given. Errors: as TransportSecurity::Tls. Starts
  // threads. REQUIRES: Check() is OK.
  absl::StatusOr<TransportSecurity> Open() const;
};

inline constexpr char kClusterTlsRemedy[] =
    "--cluster_tls_cert, --cluster_tls_key and --cluster_tls_ca";

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_CLUSTER_TLS_H_

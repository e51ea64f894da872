#include "client/call/client_security.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ringattn::client {

absl::StatusOr<TransportSecurity> SecurityOf(const ClientOptions& options) {
  const bool any = !options.tls_ca.empty() || !options.tls_cert.empty() ||
                   !options.tls_key.empty() || !options.tls_server_name.empty();
  if (!any) return TransportSecurity();
  if (options.credentials != nullptr) {
    return absl::InvalidArgumentError("credentials cannot be combined with tls_ fields");
  }
  if (options.tls_ca.empty()) {
    return absl::InvalidArgumentError(
        "tls_ca is empty; TLS needs the authorities that sign the server's certificate");
  }
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError("tls_cert and tls_key must be given together");
  }
  auto security =
      TransportSecurity::Tls({.files = {options.tls_cert, options.tls_key, options.tls_ca},
                              .server_name = options.tls_server_name});
  if (!security.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("tls: ", security.status().message()));
  }
  return security;
}

}  // namespace ringattn::client

#include "common/process/cluster_tls.h"

#include <utility>

#include "CLI/App.hpp"
#include "absl/strings/str_cat.h"

namespace ringattn {

void ClusterTlsFlags::AddTo(CLI::App* app) {
  const char* group = "TLS between coordinator and workers (files are read again when they change)";
  const auto file = [&](const char* name, std::string* target, const char* help) {
    app->add_option(name, *target, help)->type_name("FILE")->group(group);
  };
  file("--cluster_tls_cert", &files.certificate,
       "this process's certificate in PEM, followed by its chain to an authority");
  file("--cluster_tls_key", &files.key,
       "the key of that certificate, in PEM without a pass phrase");
  file("--cluster_tls_ca", &files.authorities,
       "the authorities in PEM; both ends must show a certificate that one of them has issued");
  app->add_option("--cluster_tls_server_name", server_name,
                  "the name that a server's certificate must have; by default the host in its "
                  "address")
      ->type_name("NAME")
      ->group(group);
}

absl::Status ClusterTlsFlags::Check() const {
  const std::pair<const char*, const std::string*> all[] = {
      {"--cluster_tls_cert", &files.certificate},
      {"--cluster_tls_key", &files.key},
      {"--cluster_tls_ca", &files.authorities}};
  const bool any = !files.certificate.empty() || !files.key.empty() || !files.authorities.empty() ||
                   !server_name.empty();
  for (const auto& [name, value] : all) {
    if (any && value->empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " is missing: give all of ", kClusterTlsRemedy));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TransportSecurity> ClusterTlsFlags::Open() const {
  if (!given()) return TransportSecurity();
  return TransportSecurity::Tls(
      {.files = files, .peers = ClientCertificates::kRequired, .server_name = server_name});
}

}  // namespace ringattn

#include "common/security/credentials.h"

#include <utility>

#include <grpcpp/create_channel.h>
#include <grpcpp/security/tls_credentials_options.h>

namespace ringattn {
namespace {

grpc_ssl_client_certificate_request_type RequestTypeOf(ClientCertificates peers) {
  switch (peers) {
    case ClientCertificates::kNone:
      return GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE;
    case ClientCertificates::kOptional:
      return GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY;
    case ClientCertificates::kRequired:
      return GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
  }
  return GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
}

std::shared_ptr<grpc::ServerCredentials> PlainServerCredentials(bool with_gate) {
  if (!with_gate) return grpc::InsecureServerCredentials();
  // The same bytes on the wire, but gRPC calls a gate only with credentials that it considers
  // secure.
  return grpc::experimental::LocalServerCredentials(LOCAL_TCP);
}

}  // namespace

absl::StatusOr<TransportSecurity> TransportSecurity::Tls(const TlsOptions& options) {
  absl::StatusOr<TlsStore*> store = TlsStore::Open(options.files);
  if (!store.ok()) return store.status();
  TransportSecurity security;
  security.store_ = *store;
  security.peers_ = options.peers;
  security.server_name_ = options.server_name;
  return security;
}

std::shared_ptr<grpc::ServerCredentials> TransportSecurity::ServerCredentials(
    std::shared_ptr<grpc::AuthMetadataProcessor> gate) const {
  std::shared_ptr<grpc::ServerCredentials> credentials;
  if (is_plain()) {
    credentials = PlainServerCredentials(gate != nullptr);
  } else {
    grpc::experimental::TlsServerCredentialsOptions options(store_->provider());
    options.watch_identity_key_cert_pairs();
    if (store_->has_authorities()) options.watch_root_certs();
    options.set_cert_request_type(RequestTypeOf(peers_));
    credentials = grpc::experimental::TlsServerCredentials(options);
  }
  if (gate != nullptr) credentials->SetAuthMetadataProcessor(std::move(gate));
  return credentials;
}

std::shared_ptr<grpc::ChannelCredentials> TransportSecurity::ChannelCredentials() const {
  if (is_plain()) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(store_->provider());
  if (store_->has_authorities()) options.watch_root_certs();
  if (store_->has_identity()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

std::shared_ptr<grpc::Channel> TransportSecurity::Dial(const std::string& address,
                                                       grpc::ChannelArguments arguments) const {
  if (!is_plain() && !server_name_.empty()) arguments.SetSslTargetNameOverride(server_name_);
  return grpc::CreateCustomChannel(address, ChannelCredentials(), arguments);
}

std::optional<TlsState> TransportSecurity::state() const {
  if (is_plain()) return std::nullopt;
  return store_->state();
}

std::optional<TlsMaterial> TransportSecurity::material() const {
  if (is_plain()) return std::nullopt;
  return store_->material();
}

}  // namespace ringattn

// TransportSecurity: how the connections between two processes are protected. All gRPC listeners
// and channels of the project use it; no other code creates credentials (tests/lib/source_rules.py
// checks this).
//
// A process has one value per kind of link, because the required authentication differs:
//   clients   the public listener, and those who call it
//   cluster   the control and data listeners, and those who connect to them: mutual
//             authentication. The ring's own connections, which are not gRPC, use its material
//             (worker/comm/wire).
//
// TLS 1.2 and 1.3. Replaced files are read again (tls_store.h), so listeners and channels continue
// while certificates rotate.
#ifndef RINGATTN_COMMON_SECURITY_CREDENTIALS_H_
#define RINGATTN_COMMON_SECURITY_CREDENTIALS_H_

#include <memory>
#include <optional>
#include <string>

#include <grpcpp/channel.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/status/statusor.h"
#include "common/security/tls_material.h"
#include "common/security/tls_store.h"

namespace ringattn {

// The client certificate that a listener requests. A certificate that is shown must be issued by
// one of the authorities.
enum class ClientCertificates {
  kNone,      // not requested
  kOptional,  // requested; may be missing
  kRequired,  // peers without a certificate are not connected
};

struct TlsOptions {
  // A listener needs a certificate, and authorities unless peers is kNone. A channel needs
  // authorities, and a certificate if the listener requires one.
  TlsFiles files;
  ClientCertificates peers = ClientCertificates::kRequired;  // of listeners
  // Channels: the name that the server's certificate must have; empty: the name of the host in the
  // address.
  std::string server_name = "";
};

// A value; thread safe.
class TransportSecurity {
 public:
  // Plain text without authentication.
  TransportSecurity() = default;
  // Errors: INVALID_ARGUMENT, naming the file (tls_material.h).
  static absl::StatusOr<TransportSecurity> Tls(const TlsOptions& options);

  bool is_plain() const { return store_ == nullptr; }

  // Returns credentials for one listener; call it once at the listener's start. Never null. `gate`,
  // if given, accepts or rejects every call before its service. In plain text a gate works only on
  // loopback listeners, which reject other peers.
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials(
      std::shared_ptr<grpc::AuthMetadataProcessor> gate = nullptr) const;

  // Creates a channel with these arguments. Does not connect yet.
  std::shared_ptr<grpc::Channel> Dial(const std::string& address,
                                      grpc::ChannelArguments arguments) const;
  // Returns Dial's credentials without the server's name.
  std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials() const;

  // Both return nullopt for plain text. `material` is for the ring's connections, which are not
  // gRPC; it follows replaced files.
  std::optional<TlsState> state() const;
  std::optional<TlsMaterial> material() const;

 private:
  TlsStore* store_ = nullptr;
  ClientCertificates peers_ = ClientCertificates::kNone;
  std::string server_name_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_CREDENTIALS_H_

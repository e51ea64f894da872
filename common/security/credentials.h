// TransportSecurity: how the bytes between two processes are protected. Every gRPC listener
// and every channel of the project is made from one; nothing else names credentials
// (tests/lib/source_rules.py holds that up).
//
// A process has one value per kind of link, since who has to prove what differs:
//   clients   the public listener, and those who call it
//   cluster   the control and the data listeners, and those who dial them: both ends prove
//             who they are. The ring's own connections, which are not gRPC's, stay as they are.
//
// TLS 1.2 and 1.3. Files that are replaced are read again (tls_store.h), so listeners and
// channels stay as they are while certificates rotate.
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

// What a listener asks of those who connect. Whatever they show has to lead to an authority.
enum class PeerProof {
  kNone,      // no certificate is asked for
  kOptional,  // one is asked for and may be missing
  kRequired,  // who shows none is not connected
};

struct TlsOptions {
  // A listener needs a certificate, and authorities unless peers prove nothing. A channel
  // needs authorities, and a certificate where the listener asks for one.
  TlsFiles files;
  PeerProof peers = PeerProof::kRequired;  // of listeners
  // Of channels: the name that the server's certificate has to be for; empty: the host's that
  // is dialled.
  std::string server_name = "";
};

// A value; thread safe.
class TransportSecurity {
 public:
  // Off: plain text, and a peer proves nothing.
  TransportSecurity() = default;
  // Errors: INVALID_ARGUMENT, naming the file (tls_material.h).
  static absl::StatusOr<TransportSecurity> Tls(const TlsOptions& options);

  bool is_plain() const { return store_ == nullptr; }

  // For one listener each, asked once at its start. Never null. `gate`, if given, decides on
  // every call before its service hears of it; in plain text that is for listeners on
  // loopback, which refuse other peers.
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials(
      std::shared_ptr<grpc::AuthMetadataProcessor> gate = nullptr) const;

  // A channel with these arguments. It does not connect yet.
  std::shared_ptr<grpc::Channel> Dial(const std::string& address,
                                      grpc::ChannelArguments arguments) const;
  // What Dial uses, but for the server's name.
  std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials() const;

  // Nothing for plain text.
  std::optional<TlsState> state() const;

 private:
  TlsStore* store_ = nullptr;
  PeerProof peers_ = PeerProof::kNone;
  std::string server_name_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_CREDENTIALS_H_

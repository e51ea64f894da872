// TransportSecurity: how the bytes between two processes are protected. Every gRPC listener
// and every channel of the project is made from one; nothing else names credentials
// (tests/lib/source_rules.py holds that up).
//
// A process has one value per kind of link, since who has to prove what differs:
//   clients   the public listener, and those who call it
//   cluster   the control and the data listeners, and those who dial them: both ends prove
//             who they are. The ring's own connections, which are not gRPC's, belong here too.
//
// Plain text is all there is so far. TLS comes as a second way to make a value, from the
// files {certificate, key, authorities} and whether the peer has to show a certificate. What
// reads those files again as they are replaced is shared by all copies of the value and by
// what they return, so listeners and channels stay as they are while certificates rotate.
#ifndef RINGATTN_COMMON_SECURITY_CREDENTIALS_H_
#define RINGATTN_COMMON_SECURITY_CREDENTIALS_H_

#include <memory>

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

namespace ringattn {

// A value; thread safe.
class TransportSecurity {
 public:
  // Off: plain text, and a peer proves nothing.
  TransportSecurity() = default;

  // For one listener or channel each, asked once at its start. Never null.
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials() const;
  std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials() const;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_CREDENTIALS_H_

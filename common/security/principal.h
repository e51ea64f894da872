// Principal: on whose behalf a call is made, as the transport has proved it.
#ifndef RINGATTN_COMMON_SECURITY_PRINCIPAL_H_
#define RINGATTN_COMMON_SECURITY_PRINCIPAL_H_

#include <string>

#include <grpcpp/security/auth_context.h>
#include <grpcpp/server_context.h>

namespace ringattn {

struct Principal {
  enum class Kind {
    kAnonymous,    // nothing was proved: plain text, or no certificate shown
    kSpiffe,       // a certificate with a SPIFFE ID: "spiffe://domain/path"
    kX509Subject,  // another certificate: its subject, "CN=trainer,O=lab"
  };
  Kind kind = Kind::kAnonymous;
  std::string name;  // empty iff anonymous

  // One string for both, that no two principals share: what owns request ids and places in
  // queues. Empty for all that are anonymous; "spiffe://…", which is its own prefix, or
  // "x509:" and the subject.
  std::string id() const;

  friend bool operator==(const Principal&, const Principal&) = default;
};

// The SPIFFE ID of the peer's certificate, else its subject, else anonymous. Nothing that the
// client only says (metadata, a certificate that was not verified) counts.
Principal PrincipalOf(const grpc::AuthContext& auth);

// The same of a call being served. REQUIRES: called by the handler, before the call is shared
// with other threads (gRPC makes the context's authentication when it is first asked for).
Principal PrincipalOf(const grpc::ServerContextBase& context);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_PRINCIPAL_H_

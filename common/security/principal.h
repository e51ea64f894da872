// Principal: the authenticated identity of a call's peer.
#ifndef RINGATTN_COMMON_SECURITY_PRINCIPAL_H_
#define RINGATTN_COMMON_SECURITY_PRINCIPAL_H_

#include <string>

#include <grpcpp/security/auth_context.h>
#include <grpcpp/server_context.h>

namespace ringattn {

struct Principal {
  enum class Kind {
    kAnonymous,    // no authentication: plain text, or no certificate
    kSpiffe,       // a certificate with a SPIFFE ID: "spiffe://domain/path"
    kX509Subject,  // another certificate: its subject, "CN=trainer,O=lab"
  };
  Kind kind = Kind::kAnonymous;
  std::string name;  // empty only if anonymous

  // Returns one string that is unique per principal and owns request ids and queue places. Empty
  // for anonymous peers; else "spiffe://…", or "x509:" and the subject.
  std::string id() const;

  friend bool operator==(const Principal&, const Principal&) = default;
};

// Returns the SPIFFE ID of the peer's certificate, else its subject, else anonymous. Ignores
// unauthenticated data (metadata, certificates that were not verified).
Principal PrincipalOf(const grpc::AuthContext& auth);

// The same for a call being served. REQUIRES: called by the handler, before it shares the call with
// other threads (gRPC creates the context's authentication on first use).
Principal PrincipalOf(const grpc::ServerContextBase& context);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_PRINCIPAL_H_

// KnownClients: whom the operator lets in, as a clients file says. docs/security.md has an
// example.
//
//   {"clients": [{"name": "trainer",
//                 "token_sha256": ["<64 hexadecimal digits>"],
//                 "certificates": ["spiffe://lab.example/trainer", "x509:O=lab,CN=trainer"],
//                 "weight": 2, "max_requests_in_flight": 32, "max_queued_bytes": 8589934592}]}
#ifndef RINGATTN_SERVER_IDENTITY_CLIENTS_FILE_H_
#define RINGATTN_SERVER_IDENTITY_CLIENTS_FILE_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/security/principal.h"
#include "common/security/secret.h"
#include "server/core/events/client_terms.h"

namespace ringattn::server {

struct KnownClient {
  std::string name;  // 1 to 64 of A-Z a-z 0-9 . _ - / @, unique
  ClientTerms terms;
};

// Bounds of a file. Every token is compared with every digest: some 20 us of them at most.
inline constexpr size_t kMaxClients = 1024;
inline constexpr size_t kMaxTokensPerClient = 4;
inline constexpr size_t kMaxCertificatesPerClient = 64;
inline constexpr double kMinWeight = 0.01;
inline constexpr double kMaxWeight = 100;

// A value; const once made, and then thread safe.
class KnownClients {
 public:
  // INVALID_ARGUMENT, naming the client and the field, for everything that is not as above:
  // fields that it does not know, two clients of one name, token or certificate, a client that
  // nobody can be. Digests may be in either case; of a certificate a SPIFFE ID or the subject
  // as `openssl x509 -noout -subject -nameopt RFC2253` prints it, with "x509:" before it or not.
  static absl::StatusOr<KnownClients> Parse(absl::string_view json);

  // Null: nobody's. Takes as long whoever it is.
  const KnownClient* ByToken(absl::string_view token) const;
  // Null: nobody's, anonymous ones included.
  const KnownClient* ByCertificate(const Principal& principal) const;

  const std::vector<KnownClient>& clients() const { return clients_; }

 private:
  // Of the client that is added next. The error begins with the field.
  absl::Status AddTokens(const std::vector<std::string>& digests);
  absl::Status AddCertificates(const std::vector<std::string>& ids);

  std::vector<KnownClient> clients_;
  std::vector<std::pair<SecretDigest, size_t>> tokens_;  // with places in clients_
  std::map<std::string, size_t> certificates_;           // by Principal::id()
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_IDENTITY_CLIENTS_FILE_H_

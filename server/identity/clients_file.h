// KnownClients: the clients that the operator admits, from a clients file. docs/security.md has an
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

// Bounds of a file. Each token is compared with every digest, which takes at most 20 us.
inline constexpr size_t kMaxClients = 1024;
inline constexpr size_t kMaxTokensPerClient = 4;
inline constexpr size_t kMaxCertificatesPerClient = 64;
inline constexpr double kMinWeight = 0.01;
inline constexpr double kMaxWeight = 100;

// Immutable, and therefore thread safe.
class KnownClients {
 public:
  // Returns INVALID_ARGUMENT with the client and the field for unknown fields, repeated names,
  // tokens or certificates, and clients without credentials. Digests may use either case. A
  // certificate is a SPIFFE ID, or a subject as printed by `openssl x509 -noout -subject -nameopt
  // RFC2253`, with or without the prefix "x509:".
  static absl::StatusOr<KnownClients> Parse(absl::string_view json);

  // Returns null for an unknown token. Takes the same time for every token.
  const KnownClient* ByToken(absl::string_view token) const;
  // Returns null for an unknown or anonymous principal.
  const KnownClient* ByCertificate(const Principal& principal) const;

  const std::vector<KnownClient>& clients() const { return clients_; }

 private:
  // Adds credentials of the client that is added next. The error begins with the field.
  absl::Status AddTokens(const std::vector<std::string>& digests);
  absl::Status AddCertificates(const std::vector<std::string>& ids);

  std::vector<KnownClient> clients_;
  std::vector<std::pair<SecretDigest, size_t>> tokens_;  // with indexes into clients_
  std::map<std::string, size_t> certificates_;           // by Principal::id()
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_IDENTITY_CLIENTS_FILE_H_

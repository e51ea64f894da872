// TlsMaterial: what a process proves itself with and whom it believes, read from PEM files and
// checked as far as one end can.
#ifndef RINGATTN_COMMON_SECURITY_TLS_MATERIAL_H_
#define RINGATTN_COMMON_SECURITY_TLS_MATERIAL_H_

#include <string>
#include <tuple>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ringattn {

// Paths. REQUIRES: certificate and key both or neither; not all empty.
struct TlsFiles {
  std::string certificate = {};  // the own one first, then those that lead to an authority
  std::string key = {};          // the certificate's, without a pass phrase
  std::string authorities = {};  // certificates that peers' have to lead to

  friend bool operator<(const TlsFiles& a, const TlsFiles& b) {
    return std::tie(a.certificate, a.key, a.authorities) <
           std::tie(b.certificate, b.key, b.authorities);
  }
};

struct TlsMaterial {
  std::string identity_pem;     // key, then certificates; empty if there is none
  std::string authorities_pem;  // empty if there are none
  // The first of the identity's certificates to expire; the infinite future without one.
  absl::Time expires = absl::InfiniteFuture();
};

// INVALID_ARGUMENT, naming the file: it cannot be read, is no PEM, holds no certificate or no
// key, the key is another certificate's, or a certificate of the identity has expired or is
// not valid yet.
absl::StatusOr<TlsMaterial> ReadTlsFiles(const TlsFiles& files, absl::Time now);

// What a file holds, of 1 MiB at most. Errors: INVALID_ARGUMENT with `what` and the path.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path, absl::string_view what);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_TLS_MATERIAL_H_

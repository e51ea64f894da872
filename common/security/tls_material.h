// TlsMaterial: a process's TLS identity and trusted authorities, read from PEM files and checked as
// far as one end can.
#ifndef RINGATTN_COMMON_SECURITY_TLS_MATERIAL_H_
#define RINGATTN_COMMON_SECURITY_TLS_MATERIAL_H_

#include <string>
#include <tuple>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace ringattn {

// Paths. REQUIRES: certificate and key are both set or both empty; not all are empty.
struct TlsFiles {
  std::string certificate = {};  // the own certificate first, then its chain to an authority
  std::string key = {};          // of the certificate, without a pass phrase
  // certificates of the authorities that peers' certificates must chain to
  std::string authorities = {};

  friend bool operator<(const TlsFiles& a, const TlsFiles& b) {
    return std::tie(a.certificate, a.key, a.authorities) <
           std::tie(b.certificate, b.key, b.authorities);
  }
};

struct TlsMaterial {
  std::string identity_pem;     // key, then certificates; empty if there is none
  std::string authorities_pem;  // empty if there are none
  // The earliest expiry among the identity's certificates; infinite without an identity.
  absl::Time expires = absl::InfiniteFuture();
};

// Returns INVALID_ARGUMENT, naming the file, if it cannot be read, is not PEM, or holds no
// certificate or no key; if the key belongs to another certificate; or if a certificate of the
// identity has expired or is not valid yet.
absl::StatusOr<TlsMaterial> ReadTlsFiles(const TlsFiles& files, absl::Time now);

// Returns the contents of a regular file of at most 1 MiB. Does not wait for the writer of a FIFO.
// Errors: INVALID_ARGUMENT with `what` and the path. Blocks while the file system does, so callers
// must not hold a lock.
absl::StatusOr<std::string> ReadWholeFile(const std::string& path, absl::string_view what);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_TLS_MATERIAL_H_

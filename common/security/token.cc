#include "common/security/token.h"

#include <cstdlib>

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

namespace ringattn {

std::string RandomToken() {
  std::string token(kTokenBytes, '\0');
  // The process must not continue without randomness.
  if (RAND_bytes(reinterpret_cast<unsigned char*>(token.data()), kTokenBytes) != 1) std::abort();
  return token;
}

std::string DeriveToken(absl::string_view seed, absl::string_view what) {
  std::string token(kTokenBytes, '\0');
  unsigned int bytes = 0;
  const unsigned char* const done =
      HMAC(EVP_sha256(), seed.data(), static_cast<int>(seed.size()),
           reinterpret_cast<const unsigned char*>(what.data()), what.size(),
           reinterpret_cast<unsigned char*>(token.data()), &bytes);
  if (done == nullptr || bytes != kTokenBytes) std::abort();
  return token;
}

}  // namespace ringattn

// Single-use tokens that grant a permission: a client's stream to a worker.
#ifndef RINGATTN_COMMON_SECURITY_TOKEN_H_
#define RINGATTN_COMMON_SECURITY_TOKEN_H_

#include <string>

#include "absl/strings/string_view.h"

namespace ringattn {

inline constexpr size_t kTokenBytes = 32;

// Returns a token of random bytes from the operating system.
std::string RandomToken();

// Returns HMAC-SHA256 of `what` under `seed`, which is a RandomToken. Without the seed, other
// tokens do not help to compute this one.
std::string DeriveToken(absl::string_view seed, absl::string_view what);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_TOKEN_H_

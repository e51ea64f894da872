// Tokens that say by themselves what somebody may do, once: of clients' streams to workers.
#ifndef RINGATTN_COMMON_SECURITY_TOKEN_H_
#define RINGATTN_COMMON_SECURITY_TOKEN_H_

#include <string>

#include "absl/strings/string_view.h"

namespace ringattn {

inline constexpr size_t kTokenBytes = 32;

// From the operating system.
std::string RandomToken();

// HMAC-SHA256 of `what` under `seed`, which is a RandomToken: who knows neither it nor another
// secret can tell the token of nothing, however many others he has seen.
std::string DeriveToken(absl::string_view seed, absl::string_view what);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SECURITY_TOKEN_H_

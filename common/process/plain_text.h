// Permits plain text on loopback; elsewhere the operator must permit it.
#ifndef RINGATTN_COMMON_PROCESS_PLAIN_TEXT_H_
#define RINGATTN_COMMON_PROCESS_PLAIN_TEXT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ringattn {

// Returns INVALID_ARGUMENT, naming the flag and its remedies, unless `address` is loopback
// (loopback.h). `remedy`: the flags that would protect it, "--tls_cert and --tls_key".
absl::Status CheckPlainText(absl::string_view flag, const std::string& address,
                            absl::string_view remedy);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_PLAIN_TEXT_H_

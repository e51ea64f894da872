// How fast plain TCP moves bytes on this machine: the bound that bench's payload
// rates stand beside.
#ifndef RINGATTN_CLIENT_CLI_LOOPBACK_RATE_H_
#define RINGATTN_CLIENT_CLI_LOOPBACK_RATE_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace ringattn::cli {

// Bytes per second of one connection over loopback, `bytes` sent in large writes from
// memory and received into one buffer. Errors: the system's.
absl::StatusOr<double> LoopbackBytesPerSecond(int64_t bytes);

}  // namespace ringattn::cli

#endif  // RINGATTN_CLIENT_CLI_LOOPBACK_RATE_H_

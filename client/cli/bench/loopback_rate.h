// How fast plain TCP moves bytes on this machine: the bound that bench's payload
// rates stand beside.
#ifndef RINGATTN_CLIENT_CLI_BENCH_LOOPBACK_RATE_H_
#define RINGATTN_CLIENT_CLI_BENCH_LOOPBACK_RATE_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace ringattn::client::cli {

// Bytes per second of so many connections at a time over loopback, together: `bytes` in
// all, sent in large writes from memory and received into one buffer each. Errors: the
// system's. REQUIRES: connections >= 1.
absl::StatusOr<double> LoopbackBytesPerSecond(int64_t bytes, int connections);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_LOOPBACK_RATE_H_

// The rate of plain TCP on this machine, as a bound for the payload rates of `bench`.
#ifndef RINGATTN_CLIENT_CLI_BENCH_LOOPBACK_RATE_H_
#define RINGATTN_CLIENT_CLI_BENCH_LOOPBACK_RATE_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace ringattn::client::cli {

// Returns the total bytes per second of concurrent loopback connections that transfer `bytes` in
// all, in large writes from memory, each received into one buffer. Errors: the system's. Requires
// connections >= 1.
absl::StatusOr<double> LoopbackBytesPerSecond(int64_t bytes, int connections);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_LOOPBACK_RATE_H_

// Upper bounds for the payload rate of a call by its transport, measured on this machine in the
// same run.
// Tests: payload_bound_test.cc.
#ifndef RINGATTN_CLIENT_CLI_BENCH_PAYLOAD_BOUND_H_
#define RINGATTN_CLIENT_CLI_BENCH_PAYLOAD_BOUND_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/api/call.h"
#include "client/cli/command.h"

namespace ringattn::client::cli {

struct PayloadBound {
  enum class Kind : uint8_t {
    kTcp,     // plain TCP over loopback, one hop
    kMemcpy,  // from shared memory
    kNone     // not measured
  };
  Kind kind = Kind::kNone;
  int side_by_side = 0;  // connections, or threads
  double bytes_per_second = 0;

  std::string Text() const;
  Json ToJson() const;
};

// Returns the total bytes per second of threads that copy `bytes` out of a memfd, which is like a
// region's memory, into their own memory: the better of two passes. Errors: the system's. Requires
// threads >= 1.
absl::StatusOr<double> MemcpyBytesPerSecond(int64_t bytes, int threads);

// Measures each bound once. Not thread safe.
class PayloadBounds {
 public:
  // `channels_per_worker`: as in ClientOptions. `relay`: the bound of relayed calls, already
  // measured.
  PayloadBounds(int channels_per_worker, const PayloadBound& relay);

  // Relay: plain TCP on as many connections as the client has, over one hop. Direct: plain TCP on
  // as many connections as the library opens to all members. Host memory: a memcpy by the default
  // number of copying threads of that many workers (--copy_threads). CUDA memory: none, because
  // only a GPU could measure it. Errors: the system's.
  absl::StatusOr<PayloadBound> Of(const CallReport& report);

 private:
  const int channels_per_worker_;
  std::vector<PayloadBound> measured_;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_PAYLOAD_BOUND_H_

// What a call's payload can move at most by the way that it took, measured on this machine in the
// same run: the bounds that bench's rates stand beside.
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
    kMemcpy,  // out of shared memory
    kNone     // not measured
  };
  Kind kind = Kind::kNone;
  int side_by_side = 0;  // connections, or threads
  double bytes_per_second = 0;

  std::string Text() const;
  Json ToJson() const;
};

// Bytes per second of so many threads, together, that copy `bytes` out of memory like a region's
// (a memfd) into their own; the better of two passes. Errors: the system's. REQUIRES: threads >= 1.
absl::StatusOr<double> MemcpyBytesPerSecond(int64_t bytes, int threads);

// Measures each bound once. Not thread safe.
class PayloadBounds {
 public:
  // `channels_per_worker`: as ClientOptions has it. `relay`: of calls by the coordinator, measured
  // already.
  PayloadBounds(int channels_per_worker, const PayloadBound& relay);

  // By the coordinator's stream: plain TCP on as many connections as the client has, over one
  // hop. By direct streams: plain TCP on as many as the client library has to all members. By host
  // memory: a memcpy by as many threads as that many workers of this machine copy with unless told
  // otherwise (--copy_threads). By CUDA memory: none; what its copies can do only a GPU knows.
  // Errors: the system's.
  absl::StatusOr<PayloadBound> Of(const CallReport& report);

 private:
  const int channels_per_worker_;
  std::vector<PayloadBound> measured_;
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_BENCH_PAYLOAD_BOUND_H_

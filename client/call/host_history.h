// HostHistory: whether calls of a client that offer host memory are served over it. A call that
// offers nothing else needs no chunks, so it can share a stream (call_sharer.h).
//
// Tests: host_alone_test.cc
#ifndef RINGATTN_CLIENT_CALL_HOST_HISTORY_H_
#define RINGATTN_CLIENT_CALL_HOST_HISTORY_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {

// Thread safe.
class HostHistory {
 public:
  // After a call that offered host memory alone in vain, others do not for this long: each failure
  // costs a round trip.
  static constexpr absl::Duration kPause = absl::Seconds(5);

  // Whether the next call should offer host memory alone.
  bool RecommendsAlone() const {
    return last_was_served_.load() && absl::ToUnixMicros(MonotonicNow()) >= not_before_.load();
  }
  // A call that offered host memory was accepted, over host memory or over another transport.
  void Accepted(bool by_host) { last_was_served_.store(by_host); }
  // A call that offered host memory alone was refused.
  void Refused() { not_before_.store(absl::ToUnixMicros(MonotonicNow() + kPause)); }

 private:
  std::atomic<bool> last_was_served_{false};
  std::atomic<int64_t> not_before_{0};  // monotonic, microseconds
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_HOST_HISTORY_H_

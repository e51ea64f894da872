// UploadMeter: measures how far a client's upload lags behind the minimum rate.
#ifndef RINGATTN_SERVER_EDGE_CALL_UPLOAD_METER_H_
#define RINGATTN_SERVER_EDGE_CALL_UPLOAD_METER_H_

#include <cstdint>

#include "absl/time/time.h"
#include "common/base/limits.h"

namespace ringattn::server {

// The lag grows with the time in which the server could have received bytes. It shrinks by the time
// that received bytes take at the minimum rate. It is never negative, so a fast start earns no
// credit. Pure: the caller provides the clock. Not thread safe.
class UploadMeter {
 public:
  explicit UploadMeter(const Limits& limits)
      : bytes_per_second_(static_cast<double>(limits.min_upload_bytes_per_second)),
        grace_(limits.upload_grace),
        contended_grace_(limits.upload_grace_contended) {}

  // Records the interval since the last call: `bytes` arrived, and `waits` states whether the
  // server waited for the client. `contended`: other requests wait for a slot.
  void Look(absl::Time now, int64_t bytes, bool waits, bool contended);

  // Returns true once the lag exceeds its limit.
  bool too_slow() const { return lag_ > grace_ || contended_lag_ > contended_grace_; }

 private:
  // Upper bound for one interval. Longer intervals occur only if this process was not scheduled.
  static constexpr absl::Duration kLongestLook = absl::Seconds(1);

  const double bytes_per_second_;
  const absl::Duration grace_;
  const absl::Duration contended_grace_;
  absl::Time looked_at_ = absl::InfiniteFuture();
  absl::Duration lag_;
  absl::Duration contended_lag_;  // lag while other requests wait
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_UPLOAD_METER_H_

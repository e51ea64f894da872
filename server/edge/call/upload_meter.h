// UploadMeter: how far a client's upload is behind the minimum rate.
#ifndef RINGATTN_SERVER_EDGE_CALL_UPLOAD_METER_H_
#define RINGATTN_SERVER_EDGE_CALL_UPLOAD_METER_H_

#include <cstdint>

#include "absl/time/time.h"
#include "common/base/limits.h"

namespace ringattn::server {

// The lag grows with the time in which the client's bytes could be taken, and shrinks by what
// its bytes would take at the minimum rate; it is never below zero, so that a fast begin is no
// credit for a slow rest. Pure: the clock is the caller's. Not thread safe.
class UploadMeter {
 public:
  explicit UploadMeter(const Limits& limits)
      : bytes_per_second_(static_cast<double>(limits.min_upload_bytes_per_second)),
        grace_(limits.upload_grace),
        contended_grace_(limits.upload_grace_contended) {}

  // Since the last look: `bytes` arrived, and the client was (`waits`) or was not waited for.
  // `contended`: other requests wait for a place.
  void Look(absl::Time now, int64_t bytes, bool waits, bool contended);

  // Behind by more than it may be.
  bool too_slow() const { return lag_ > grace_ || contended_lag_ > contended_grace_; }

 private:
  // What lies between two looks counts up to this: no more is ever between them but when this
  // process itself had no time.
  static constexpr absl::Duration kLongestLook = absl::Seconds(1);

  const double bytes_per_second_;
  const absl::Duration grace_;
  const absl::Duration contended_grace_;
  absl::Time looked_at_ = absl::InfiniteFuture();
  absl::Duration lag_;
  absl::Duration contended_lag_;  // since others have begun to wait
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_UPLOAD_METER_H_

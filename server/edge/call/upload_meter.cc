#include "server/edge/call/upload_meter.h"

#include <algorithm>

namespace ringattn::server {

void UploadMeter::Look(absl::Time now, int64_t bytes, bool waits, bool contended) {
  const absl::Duration passed =
      waits && now > looked_at_ ? std::min(now - looked_at_, kLongestLook) : absl::ZeroDuration();
  looked_at_ = now;
  const absl::Duration step =
      passed - absl::Seconds(static_cast<double>(bytes) / bytes_per_second_);
  lag_ = std::max(lag_ + step, absl::ZeroDuration());
  contended_lag_ =
      contended ? std::max(contended_lag_ + step, absl::ZeroDuration()) : absl::ZeroDuration();
}

}  // namespace ringattn::server

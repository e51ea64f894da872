// Converts between google.protobuf.Duration and absl::Duration. Pure.
#ifndef RINGATTN_COMMON_WIRE_DURATIONS_H_
#define RINGATTN_COMMON_WIRE_DURATIONS_H_

#include <google/protobuf/duration.pb.h>

#include "absl/time/time.h"

namespace ringattn {

// Exact to the nanosecond. Saturates at the range of int64 seconds.
inline void SetDuration(absl::Duration duration, google::protobuf::Duration* proto) {
  const int64_t seconds = absl::IDivDuration(duration, absl::Seconds(1), &duration);
  proto->set_seconds(seconds);
  proto->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
}
inline void SetSeconds(double seconds, google::protobuf::Duration* proto) {
  SetDuration(absl::Seconds(seconds), proto);
}

inline absl::Duration ToDuration(const google::protobuf::Duration& proto) {
  return absl::Seconds(proto.seconds()) + absl::Nanoseconds(proto.nanos());
}
inline double ToSeconds(const google::protobuf::Duration& proto) {
  return absl::ToDoubleSeconds(ToDuration(proto));
}

}  // namespace ringattn

#endif  // RINGATTN_COMMON_WIRE_DURATIONS_H_

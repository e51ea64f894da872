// Sets the wall clock of a test's process.
#ifndef RINGATTN_COMMON_BASE_TESTING_WALL_CLOCK_H_
#define RINGATTN_COMMON_BASE_TESTING_WALL_CLOCK_H_

#include "absl/time/time.h"

namespace ringattn {

// From now on, CLOCK_REALTIME is `by` behind the system's in this process. Replaces clock_gettime,
// so it does not affect the kernel's timeouts. Thread safe.
void SetWallClockBack(absl::Duration by);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_BASE_TESTING_WALL_CLOCK_H_

#include "common/base/testing/wall_clock.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace {

std::atomic<int64_t> seconds_back{0};

}  // namespace

// Takes precedence over the C library's in an executable that links this file.
extern "C" int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const long result = syscall(SYS_clock_gettime, clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec -= seconds_back.load();
  return static_cast<int>(result);
}

namespace ringattn {

void SetWallClockBack(absl::Duration by) { seconds_back = absl::ToInt64Seconds(by); }

}  // namespace ringattn

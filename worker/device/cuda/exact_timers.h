// UseExactTimers: sleeps of tens of microseconds.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_EXACT_TIMERS_H_
#define RINGATTN_WORKER_DEVICE_CUDA_EXACT_TIMERS_H_

#include <sys/prctl.h>

namespace ringattn::worker {

// Lets timed waits of this thread end within microseconds. By default, the kernel's timers have
// 50 us of slack.
inline void UseExactTimers() {
  constexpr unsigned long kSlackNanoseconds = 1000;
  thread_local const bool set = prctl(PR_SET_TIMERSLACK, kSlackNanoseconds) == 0;
  (void)set;  // without it, waits take longer
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_EXACT_TIMERS_H_

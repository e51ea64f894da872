// The polling interval for NCCL's background work.
#ifndef RINGATTN_WORKER_COMM_NCCL_SETTLE_PAUSE_H_
#define RINGATTN_WORKER_COMM_NCCL_SETTLE_PAUSE_H_

#include <algorithm>

#include "absl/time/time.h"

namespace ringattn::worker {

// Returns how long to sleep before the next poll; zero means to poll again at once. `waited`: how
// long the wait has lasted. A warm group is launched within 0.1 ms and the first group of a run
// within about one, while its kernels wait for it; joining takes a second. Polling delays the
// result by at most an eighth of the wait.
inline absl::Duration SettlePause(absl::Duration waited) {
  if (waited < absl::Microseconds(300)) return absl::ZeroDuration();
  return std::min(waited / 8, absl::Milliseconds(1));
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_NCCL_SETTLE_PAUSE_H_

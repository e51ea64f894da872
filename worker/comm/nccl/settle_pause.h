// How long to sleep between two looks at what NCCL does in the background.
#ifndef RINGATTN_WORKER_COMM_NCCL_SETTLE_PAUSE_H_
#define RINGATTN_WORKER_COMM_NCCL_SETTLE_PAUSE_H_

#include <algorithm>

#include "absl/time/time.h"

namespace ringattn::worker {

// `waited`: for how long already. Zero means: look again at once. A warm group is launched
// within 0.1 ms and the first of a pass within about one, while the kernels wait behind
// it; joining takes a second. So a look comes late by at most an eighth of the wait.
inline absl::Duration SettlePause(absl::Duration waited) {
  if (waited < absl::Microseconds(300)) return absl::ZeroDuration();
  return std::min(waited / 8, absl::Milliseconds(1));
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_NCCL_SETTLE_PAUSE_H_

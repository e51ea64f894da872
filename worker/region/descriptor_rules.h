// Which file descriptors a worker takes as a client's memory.
#ifndef RINGATTN_WORKER_REGION_DESCRIPTOR_RULES_H_
#define RINGATTN_WORKER_REGION_DESCRIPTOR_RULES_H_

#include <cstdint>

#include "absl/status/status.h"

namespace ringattn::worker {

// OK, or INVALID_ARGUMENT saying what is wrong. Taken is a memfd of ordinary pages that cannot
// shrink any more (touching a page beyond the end is SIGBUS), all of whose pages are there (a
// page that cannot be had when it is touched is SIGBUS too), that may be read and written and is
// at least `bytes` long.
absl::Status CheckRegionDescriptor(int fd, int64_t bytes);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_DESCRIPTOR_RULES_H_

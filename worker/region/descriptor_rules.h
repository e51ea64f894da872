// Checks which file descriptors a worker accepts as a client's memory.
#ifndef RINGATTN_WORKER_REGION_DESCRIPTOR_RULES_H_
#define RINGATTN_WORKER_REGION_DESCRIPTOR_RULES_H_

#include <cstdint>

#include "absl/status/status.h"

namespace ringattn::worker {

// Returns OK, or INVALID_ARGUMENT with the reason. Accepts a memfd of ordinary pages that is open
// for reading and writing and has at least `bytes` bytes. It must be sealed against shrinking, and
// all of its pages must be allocated. Otherwise the worker could get SIGBUS when it touches a page.
absl::Status CheckRegionDescriptor(int fd, int64_t bytes);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_DESCRIPTOR_RULES_H_

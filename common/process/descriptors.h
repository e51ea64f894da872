// File descriptors of this process: how many it may have, how many it has.
#ifndef RINGATTN_COMMON_PROCESS_DESCRIPTORS_H_
#define RINGATTN_COMMON_PROCESS_DESCRIPTORS_H_

#include <cstdint>

namespace ringattn {

// Raises the soft limit (RLIMIT_NOFILE) to the hard one and returns what holds then.
// Soft limits of 1,024 protect programs that use select(), which these do not. At the
// start of main; children inherit it.
int64_t RaiseDescriptorLimit();

// The soft limit now. Thread safe.
int64_t DescriptorLimit();

// Descriptors open now; -1 if /proc cannot be read (there is no descriptor left for it, for
// instance). Takes time in proportion. Thread safe.
int64_t OpenDescriptors();

// Resident memory in bytes; -1 if /proc cannot be read. Thread safe.
int64_t ResidentBytes();

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_DESCRIPTORS_H_

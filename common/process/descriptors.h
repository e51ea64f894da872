// File descriptors of this process: limit and use.
#ifndef RINGATTN_COMMON_PROCESS_DESCRIPTORS_H_
#define RINGATTN_COMMON_PROCESS_DESCRIPTORS_H_

#include <cstdint>

namespace ringattn {

// Raises the soft limit (RLIMIT_NOFILE) to the hard one and returns the resulting limit. Soft
// limits of 1,024 protect programs that use select(), which these programs do not. Call at the
// start of main; child processes inherit the limit.
int64_t RaiseDescriptorLimit();

// Returns the current soft limit. Thread safe.
int64_t DescriptorLimit();

// Returns the number of open descriptors; -1 if /proc cannot be read (for example because no
// descriptor is left). Time grows with that number. Thread safe.
int64_t OpenDescriptors();

// Returns resident memory in bytes; -1 if /proc cannot be read. Thread safe.
int64_t ResidentBytes();

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_DESCRIPTORS_H_

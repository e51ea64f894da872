// Configures the process's allocator for gRPC's load.
#ifndef RINGATTN_COMMON_WIRE_ALLOCATOR_H_
#define RINGATTN_COMMON_WIRE_ALLOCATOR_H_

#include <cstdint>

namespace ringattn::wire {

// Lets malloc keep freed memory, up to a bound, instead of returning it to the kernel. gRPC
// allocates and frees memory for every read. By default glibc returns it each time, and the kernel
// clears and maps it again: a third of the processor time of a bare gRPC relay
// (tests/bench/results/relay_settings.csv). Call once at the start of main, before other threads
// start. Programs that transfer much data through the client library benefit equally.
void KeepFreedMemory();

// Returns the bytes that malloc keeps free in all arenas. Thread safe; takes a few microseconds per
// arena.
int64_t FreedBytes();

// Returns all whole free pages to the kernel. The bound above applies only to the end of each
// arena: after a burst of small allocations, a few live ones keep the rest. Thread safe. Holds each
// arena's lock for about 0.2 ms per MiB, so call it only while little is in flight.
void ReleaseFreedMemory();

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_ALLOCATOR_H_

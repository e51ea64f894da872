// The process's allocator under gRPC's load.
#ifndef RINGATTN_COMMON_WIRE_ALLOCATOR_H_
#define RINGATTN_COMMON_WIRE_ALLOCATOR_H_

#include <cstdint>

namespace ringattn::wire {

// Lets malloc keep what it has freed, up to a bound, instead of giving it back to the
// kernel. gRPC allocates and frees memory for every read; by default glibc returns it
// each time, and the kernel clears and maps it anew: a third of all processor time of a
// bare gRPC relay (tests/bench/results/relay_settings.csv). Once, at the start of main, before
// other threads. Programs that move much through the client library gain as much by calling it.
void KeepFreedMemory();

// Bytes that malloc keeps free, in all arenas. Thread safe; some microseconds an arena.
int64_t FreedBytes();

// Gives the kernel all whole pages among them. The bound above holds only for the end of
// each arena: after a burst of small pieces a few that live keep the rest. Thread safe; holds
// each arena's lock for some 0.2 ms a MiB, so not while much is in flight.
void ReleaseFreedMemory();

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_ALLOCATOR_H_

#include "common/wire/allocator.h"

#include <malloc.h>

#include <algorithm>
#include <thread>

namespace ringattn::wire {

void KeepFreedMemory() {
  // Above what a few streams have in flight (coordinator_relay.h), below what anybody misses.
  mallopt(M_TRIM_THRESHOLD, 32 << 20);
  // Setting either threshold ends glibc's own adjustment of both. Larger than any
  // buffer that gRPC reads into.
  mallopt(M_MMAP_THRESHOLD, 4 << 20);
  // Memory that one arena keeps free is none to the others: few of them bound the sum,
  // yet many threads need some to choose from.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  mallopt(M_ARENA_MAX, std::clamp(cores / 2, 2, 8));
}

int64_t FreedBytes() { return static_cast<int64_t>(mallinfo2().fordblks); }

void ReleaseFreedMemory() { malloc_trim(0); }

}  // namespace ringattn::wire

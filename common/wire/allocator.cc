#include "common/wire/allocator.h"

#include <malloc.h>

#include <algorithm>
#include <thread>

namespace ringattn::wire {

void KeepFreedMemory() {
  // Larger than the memory that a few streams have in flight (coordinator_relay.h), and small
  // compared with a machine's memory.
  mallopt(M_TRIM_THRESHOLD, 32 << 20);
  // Setting either threshold disables glibc's automatic adjustment of both. Larger than any buffer
  // that gRPC reads into.
  mallopt(M_MMAP_THRESHOLD, 4 << 20);
  // An arena's free memory is unavailable to other arenas. A small number of arenas bounds the sum,
  // but many threads need several to choose from.
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  mallopt(M_ARENA_MAX, std::clamp(cores / 2, 2, 8));
}

int64_t FreedBytes() { return static_cast<int64_t>(mallinfo2().fordblks); }

void ReleaseFreedMemory() { malloc_trim(0); }

}  // namespace ringattn::wire

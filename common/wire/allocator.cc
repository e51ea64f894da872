#include "common/wire/allocator.h"

#include <malloc.h>

namespace ringattn::wire {

void KeepFreedMemory() {
  // Above what a few streams have in flight (request_stream.h), below what anybody misses.
  mallopt(M_TRIM_THRESHOLD, 32 << 20);
  // Setting either threshold ends glibc's own adjustment of both. Larger than any
  // buffer that gRPC reads into.
  mallopt(M_MMAP_THRESHOLD, 4 << 20);
  // Memory that one arena keeps free is none to the others: few of them bound the sum.
  mallopt(M_ARENA_MAX, 2);
}

}  // namespace ringattn::wire

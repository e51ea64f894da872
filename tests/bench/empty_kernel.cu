#include "tests/bench/empty_kernel.h"

namespace ringattn::worker {
namespace {

__global__ void empty_kernel() {}

__global__ void waiting_kernel(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace

const void* EmptyKernel() { return reinterpret_cast<const void*>(&empty_kernel); }
const void* WaitingKernel() { return reinterpret_cast<const void*>(&waiting_kernel); }

}  // namespace ringattn::worker

// Control of registers and of barriers between the threads of a block.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_THREAD_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_THREAD_CUH_

#include <cstdint>

namespace ringattn::worker::cuda {

__device__ __forceinline__ bool Stopped(const uint32_t* stop_word) {
  return stop_word != nullptr && *reinterpret_cast<const volatile uint32_t*>(stop_word) != 0;
}

// Returns x as a value that the assembler must keep in a register. Otherwise the assembler reads
// the special register again, which stalls for longer than a register is worth. (It cannot repeat a
// shuffle.)
__device__ __forceinline__ uint32_t Opaque(uint32_t x) { return __shfl_xor_sync(0xffffffff, x, 0); }
__device__ __forceinline__ unsigned OpaqueThread() { return Opaque(threadIdx.x); }

// Computations from `x` after this call are not moved before it, for instance out of a loop, where
// their results would occupy registers that accumulators need.
__device__ __forceinline__ void KeepHere(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void KeepHere(float& x) { asm volatile("" : "+f"(x)); }

// `barrier` is 1 to 15. Some of the kThreads threads may arrive without waiting: the threads that
// wait see all of their earlier writes.
template <int kThreads>
__device__ __forceinline__ void SyncThreads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void ArriveThreads(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_THREAD_CUH_

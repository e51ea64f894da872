// What a thread says to the assembler and to the other threads of its block.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_THREAD_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_THREAD_CUH_

#include <cstdint>

namespace ringattn::worker::cuda {

__device__ __forceinline__ bool Stopped(const uint32_t* stop_word) {
  return stop_word != nullptr && *reinterpret_cast<const volatile uint32_t*>(stop_word) != 0;
}

// The thread's index as a value that the assembler must keep in a register: it
// would rather read the special register again, which stalls for longer than a
// copy of it is worth. (A shuffle with oneself cannot be repeated elsewhere.)
__device__ __forceinline__ uint32_t Opaque(uint32_t x) { return __shfl_xor_sync(0xffffffff, x, 0); }
__device__ __forceinline__ unsigned OpaqueThread() { return Opaque(threadIdx.x); }

// What is computed from `x` below is not moved above this, out of a loop for
// instance, where it would cost registers that accumulators need.
__device__ __forceinline__ void KeepHere(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void KeepHere(float& x) { asm volatile("" : "+f"(x)); }

// `barrier` 1 to 15. Of kThreads threads some may only arrive: what they wrote
// before is seen by those that wait.
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

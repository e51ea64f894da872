// Copies from global to shared memory by cp.async: 16 bytes or one float per thread.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_COPY_ASYNC_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_COPY_ASYNC_CUH_

#include <cstdint>

namespace ringattn::worker::cuda {

// Copies 16 bytes.
__device__ __forceinline__ void CopyAsync16(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source)
               : "memory");
}

// Copies 16 bytes, or writes 16 zero bytes when !valid (then nothing is read).
__device__ __forceinline__ void CopyAsync16(uint32_t target, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}

// Copies one float, or writes 0 when !valid.
__device__ __forceinline__ void CopyAsync4(uint32_t target, const float* source, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_COPY_ASYNC_CUH_

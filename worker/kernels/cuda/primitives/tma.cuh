// Tensor reductions by the copy engine (sm_90 and later).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_TMA_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_TMA_CUH_

#include <cstdint>

namespace ringattn::worker::cuda {

// All threads that wrote the shared box call FenceBulkReads before the barrier that precedes
// StartTensorAdd. One thread starts, commits and waits.
__device__ __forceinline__ void FenceBulkReads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void StartTensorAdd(const void* map, uint32_t source, int column,
                                               int head, int row, int batch) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
      "r"(column), "r"(head), "r"(row), "r"(batch), "r"(source)
      : "memory");
#endif
}
__device__ __forceinline__ void CommitBulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Waits until the copies that this thread committed have read shared memory, or are complete.
__device__ __forceinline__ void WaitBulkReads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
// The same for all copies except the last group that this thread committed.
__device__ __forceinline__ void WaitEarlierBulkReads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitBulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_TMA_CUH_

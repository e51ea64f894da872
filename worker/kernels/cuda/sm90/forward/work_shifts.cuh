// Which items a persistent block takes, and when it leaves (WorkShifts in forward_params.h). The
// functions are executed by one lane of the producer. Without kShifts, all blocks are first ones.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WORK_SHIFTS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WORK_SHIFTS_CUH_

#include "worker/kernels/cuda/sm90/forward/forward_params.h"
#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// The low word of the multiprocessor's clock.
__device__ __forceinline__ uint32_t ClockWord() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(value));
  return value;
}

// Begins the block's shift and returns its first item. `slots` are the block's two.
template <bool kShifts>
__device__ __forceinline__ uint32_t BeginShift(const ForwardKernelParams& params, WorkSlot* slots) {
  const WorkShifts& shifts = params.shifts;
  const uint32_t block = blockIdx.x;
  if constexpr (!kShifts) return block;
  uint32_t end = 0;
  if (block + shifts.first_blocks < gridDim.x) {
    const uint32_t part = shifts.cycles / shifts.first_blocks * (block + 1);
    end = (ClockWord() + (block < shifts.first_blocks ? part : shifts.cycles)) | 1;
  }
  slots[1].producer_word = static_cast<int32_t>(end);
  return block < shifts.first_blocks ? block
                                     : shifts.first_blocks + atomicAdd(&params.counters->next, 1u);
}

// Returns the item that the block takes after the current one, or at least `items` if it leaves.
template <bool kShifts>
__device__ __forceinline__ uint32_t NextItem(const ForwardKernelParams& params,
                                             const WorkSlot* slots, uint32_t items) {
  if (items <= params.shifts.first_blocks) return items;
  if constexpr (kShifts) {
    const int32_t end = slots[1].producer_word;
    const int32_t after = static_cast<int32_t>(ClockWord() - static_cast<uint32_t>(end));
    if (end != 0 && after >= 0) return items;
  }
  return params.shifts.first_blocks + atomicAdd(&params.counters->next, 1u);
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WORK_SHIFTS_CUH_

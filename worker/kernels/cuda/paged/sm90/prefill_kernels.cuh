// Entry points of the prefill kernel of one head-dim class, in both dtypes.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PREFILL_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PREFILL_KERNELS_CUH_

#include "worker/kernels/cuda/paged/sm90/kernels.h"
#include "worker/kernels/cuda/paged/sm90/prefill_producer.cuh"
#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"

namespace ringattn::worker::cuda::paged {

template <typename Shape>
__device__ __forceinline__ void RunPrefill(const PrefillParams& params, char* memory) {
  const uint32_t shared = SharedAddress(memory);
  if (threadIdx.x == 0) {
    cuda::sm90::PrefetchMap(&params.blocks.k);
    cuda::sm90::PrefetchMap(&params.blocks.v);
    cuda::sm90::PrefetchMap(&params.q_map);
    InitPagedBarriers<Shape>(shared);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    cuda::sm90::GiveRegisters<Shape::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) PrefillProducer<Shape>::Run(params, memory, shared);
    if (warp == 1) RunClearing<Shape>(memory, shared);
  } else {
    cuda::sm90::TakeRegisters<Shape::kConsumerRegisters>();
    cuda::sm90::ForwardConsumer<Shape>::Run(params, memory, shared, warpgroup - 1);
  }
}

}  // namespace ringattn::worker::cuda::paged

// Within namespace ringattn::worker::cuda::paged. `name` is the class (d128); what follows are
// PrefillShape's numbers.
#define RINGATTN_PAGED_PREFILL(name, threads, ...)                                   \
  __global__ void __launch_bounds__(threads, 1)                                      \
      sm90_bf16_paged_prefill_##name(const __grid_constant__ PrefillParams params) { \
    extern __shared__ __align__(1024) char shared[];                                 \
    RunPrefill<PrefillShape<__nv_bfloat16, __VA_ARGS__>>(params, shared);            \
  }                                                                                  \
  __global__ void __launch_bounds__(threads, 1)                                      \
      sm90_fp16_paged_prefill_##name(const __grid_constant__ PrefillParams params) { \
    extern __shared__ __align__(1024) char shared[];                                 \
    RunPrefill<PrefillShape<__half, __VA_ARGS__>>(params, shared);                   \
  }                                                                                  \
  cuda::sm90::ForwardKernel PrefillKernel_##name() {                                 \
    using Half = PrefillShape<__half, __VA_ARGS__>;                                  \
    static_assert(Half::kThreads == threads);                                        \
    return {reinterpret_cast<const void*>(&sm90_bf16_paged_prefill_##name),          \
            reinterpret_cast<const void*>(&sm90_fp16_paged_prefill_##name),          \
            Half::kRows,                                                             \
            Half::kKeys,                                                             \
            Half::kPanels,                                                           \
            threads,                                                                 \
            Half::kSharedBytes};                                                     \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PREFILL_KERNELS_CUH_

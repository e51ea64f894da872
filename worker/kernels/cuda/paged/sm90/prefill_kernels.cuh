// Entry points of the prefill kernel of one head-dim class, in both dtypes.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PREFILL_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PREFILL_KERNELS_CUH_

#include "worker/kernels/cuda/paged/sm90/kernels.h"
#include "worker/kernels/cuda/paged/sm90/prefill_producer.cuh"
#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"

namespace ringattn::worker::cuda::paged {

// kParted: the cache holds one of several parts of each sequence.
template <typename Shape, bool kParted>
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
    if (warp == 0) {
      PrefillProducer<Shape>::Run(params, CompiledMask<kParted>(params.mask), memory, shared);
    } else if (warp == 1) {
      RunClearing<Shape>(memory, shared);
    }
  } else {
    cuda::sm90::TakeRegisters<Shape::kConsumerRegisters>();
    cuda::sm90::ForwardConsumer<Shape>::Run(params, memory, shared, warpgroup - 1);
  }
}

}  // namespace ringattn::worker::cuda::paged

// Within namespace ringattn::worker::cuda::paged. `name` is the class (d128); what follows are
// PrefillShape's numbers.
#define RINGATTN_PAGED_PREFILL_KERNEL(kernel, type, parted, threads, ...) \
  __global__ void __launch_bounds__(threads, 1)                           \
      kernel(const __grid_constant__ PrefillParams params) {              \
    extern __shared__ __align__(1024) char shared[];                      \
    RunPrefill<PrefillShape<type, __VA_ARGS__>, parted>(params, shared);  \
  }
#define RINGATTN_PAGED_PREFILL(name, threads, ...)                                                 \
  RINGATTN_PAGED_PREFILL_KERNEL(sm90_bf16_paged_prefill_##name, __nv_bfloat16, false, threads,     \
                                __VA_ARGS__)                                                       \
  RINGATTN_PAGED_PREFILL_KERNEL(sm90_fp16_paged_prefill_##name, __half, false, threads,            \
                                __VA_ARGS__)                                                       \
  RINGATTN_PAGED_PREFILL_KERNEL(sm90_bf16_paged_prefill_part_##name, __nv_bfloat16, true, threads, \
                                __VA_ARGS__)                                                       \
  RINGATTN_PAGED_PREFILL_KERNEL(sm90_fp16_paged_prefill_part_##name, __half, true, threads,        \
                                __VA_ARGS__)                                                       \
  cuda::sm90::ForwardKernel PrefillKernel_##name(bool parted) {                                    \
    using Half = PrefillShape<__half, __VA_ARGS__>;                                                \
    static_assert(Half::kThreads == threads);                                                      \
    return {parted ? reinterpret_cast<const void*>(&sm90_bf16_paged_prefill_part_##name)           \
                   : reinterpret_cast<const void*>(&sm90_bf16_paged_prefill_##name),               \
            parted ? reinterpret_cast<const void*>(&sm90_fp16_paged_prefill_part_##name)           \
                   : reinterpret_cast<const void*>(&sm90_fp16_paged_prefill_##name),               \
            Half::kRows,                                                                           \
            Half::kKeys,                                                                           \
            Half::kPanels,                                                                         \
            threads,                                                                               \
            Half::kSharedBytes};                                                                   \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PREFILL_KERNELS_CUH_

// Entry points of the decode kernel of one head-dim class, in both dtypes.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_DECODE_KERNELS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_DECODE_KERNELS_CUH_

#include "worker/kernels/cuda/paged/sm90/decode_producer.cuh"
#include "worker/kernels/cuda/paged/sm90/decode_products.cuh"
#include "worker/kernels/cuda/paged/sm90/kernels.h"
#include "worker/kernels/cuda/primitives/shared_tile.cuh"

namespace ringattn::worker::cuda::paged {

// Rows of q's tile that no box covers stay 0 throughout. Executed by the consumer group.
template <typename Shape>
__device__ __forceinline__ void ClearUnusedQueries(const DecodeParams& params, char* memory) {
  const int rows = params.forward.head_pack * params.split.rule.unit_queries;
#pragma unroll
  for (int panel = 0; panel < Shape::kPanels; ++panel) {
    uint4* const unused = reinterpret_cast<uint4*>(
        memory + Shape::kQ + panel * Shape::kQPanelBytes + rows * kPanelRowBytes);
    for (int i = threadIdx.x % 128; i < (Shape::kRows - rows) * kPanelRowBytes / 16; i += 128) {
      unused[i] = uint4{};
    }
  }
  FenceBulkReads();
  SyncThreads<128>(DecodeProducts<Shape>::kMergeTurn);
}

// Counts this thread block, after its last results. The last one signals the host. Executed by the
// consumer group.
template <typename Shape>
__device__ __forceinline__ void SignalDone(const DecodeParams& params) {
  if (params.done.word == nullptr) return;
  SyncThreads<128>(DecodeProducts<Shape>::kMergeTurn);
  if (threadIdx.x % 128 != 0) return;
  __threadfence_system();  // results of all threads of the group, which may be in host memory
  if (atomicInc(params.done.counter, gridDim.x - 1) != gridDim.x - 1) return;
  __threadfence_system();
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(params.done.word),
               "r"(params.step.step->number)
               : "memory");
}

// kParted: the cache holds one of several parts of each sequence.
template <typename Shape, bool kParted>
__device__ __forceinline__ void RunDecode(const DecodeParams& params, char* memory) {
  const SplitParams split = CompiledSplit<kParted>(params.split);
  const uint32_t shared = SharedAddress(memory);
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    cuda::sm90::PrefetchMap(&params.blocks.k);
    cuda::sm90::PrefetchMap(&params.blocks.v);
    cuda::sm90::PrefetchMap(&params.q_map);
  }
  if (threadIdx.x == 32) InitPagedBarriers<Shape>(shared);
  const int column = static_cast<int>(blockIdx.x) / params.split.packs;
  const int pack_index = static_cast<int>(blockIdx.x) % params.split.packs;
  // Unless it is fetched, the step's description is older than the append in front of this kernel.
  if (params.step_is_fetched) asm volatile("griddepcontrol.wait;" ::: "memory");
  const ColumnStart start = FindColumn<Shape::kKeys, Shape::kThreads>(
      params.step, split, column,
      *reinterpret_cast<ColumnScratch<Shape::kThreads>*>(memory + Shape::kScratch));
  if (warp == 0) {
    DecodeProducer<Shape>::Run(params, split, memory, shared, column, pack_index, start);
  } else if (warp == 1) {
    RunClearing<Shape>(memory, shared);
  } else if (warp >= 4) {
    ClearUnusedQueries<Shape>(params, memory);
    cuda::sm90::ForwardConsumer<Shape, DecodeProducts<Shape>>::Run(params, memory, shared, 0);
    SignalDone<Shape>(params);
  }
}

}  // namespace ringattn::worker::cuda::paged

// Within namespace ringattn::worker::cuda::paged. `name` is the class (d128); what follows are
// DecodeShape's numbers.
#define RINGATTN_PAGED_DECODE_KERNEL(kernel, type, parted, ...)                                   \
  __global__ void __launch_bounds__(256, 1) kernel(const __grid_constant__ DecodeParams params) { \
    extern __shared__ __align__(1024) char shared[];                                              \
    RunDecode<DecodeShape<type, __VA_ARGS__>, parted>(params, shared);                            \
  }
#define RINGATTN_PAGED_DECODE(name, ...)                                                         \
  RINGATTN_PAGED_DECODE_KERNEL(sm90_bf16_paged_decode_##name, __nv_bfloat16, false, __VA_ARGS__) \
  RINGATTN_PAGED_DECODE_KERNEL(sm90_fp16_paged_decode_##name, __half, false, __VA_ARGS__)        \
  RINGATTN_PAGED_DECODE_KERNEL(sm90_bf16_paged_decode_part_##name, __nv_bfloat16, true,          \
                               __VA_ARGS__)                                                      \
  RINGATTN_PAGED_DECODE_KERNEL(sm90_fp16_paged_decode_part_##name, __half, true, __VA_ARGS__)    \
  cuda::sm90::ForwardKernel DecodeKernel_##name(bool parted) {                                   \
    using Half = DecodeShape<__half, __VA_ARGS__>;                                               \
    static_assert(Half::kThreads == 256);                                                        \
    return {parted ? reinterpret_cast<const void*>(&sm90_bf16_paged_decode_part_##name)          \
                   : reinterpret_cast<const void*>(&sm90_bf16_paged_decode_##name),              \
            parted ? reinterpret_cast<const void*>(&sm90_fp16_paged_decode_part_##name)          \
                   : reinterpret_cast<const void*>(&sm90_fp16_paged_decode_##name),              \
            Half::kRows,                                                                         \
            Half::kKeys,                                                                         \
            Half::kPanels,                                                                       \
            Half::kThreads,                                                                      \
            Half::kSharedBytes};                                                                 \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_DECODE_KERNELS_CUH_

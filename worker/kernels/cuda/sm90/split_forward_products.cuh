// Products of the kernel for few q rows and split keys, and what follows an item: the last block to
// finish one of a tile's parts merges them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_SPLIT_FORWARD_PRODUCTS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_SPLIT_FORWARD_PRODUCTS_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/merge_parts.cuh"
#include "worker/kernels/cuda/sm90/split_forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct SplitForwardProducts : ForwardProducts<Shape> {
  using Params = SplitForwardParams;
  static constexpr int kMergeTurn = 1;  // a named barrier

  // Executed by the consumer group, behind its stores of `slot`'s rows.
  static __device__ __forceinline__ void Merge(const Params& params, const WorkSlot& slot,
                                               char* memory) {
    const int index = slot.valid - 2;  // of the tile's CombineTile
    if (params.tickets == nullptr || index < 0) return;
    const ForwardParams& forward = params.forward;
    const CombineTile combine = params.combines[index];
    uint32_t* const last = reinterpret_cast<uint32_t*>(memory + Shape::kLastPart);
    SyncThreads<128>(kMergeTurn);
    if (threadIdx.x % 128 == 0) {
      const int pack = forward.head_pack;
      const int packed_head =
          slot.batch * (forward.common.num_heads / pack) + slot.first_head / pack;
      *last = CountsLast(params.tickets + index * params.heads + packed_head,
                         combine.slot_end - combine.slot_begin);
    }
    SyncThreads<128>(kMergeTurn);
    if (*last == 0) return;
    const int rows = combine.q_rows * forward.head_pack;
#pragma unroll 1
    for (int row = (threadIdx.x & 127) / 32; row < rows; row += 4) {
      MergeRow<typename Shape::T>(forward, combine, slot.first_head, slot.batch, row);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_SPLIT_FORWARD_PRODUCTS_CUH_

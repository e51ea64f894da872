// Products of the kernel for few q rows and split keys, and the end of an item: the last block to
// finish one of a tile's parts merges them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_PRODUCTS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_PRODUCTS_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/forward/merge_parts.cuh"
#include "worker/kernels/cuda/sm90/forward/split_forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct SplitForwardProducts : ForwardProducts<Shape> {
  using T = typename Shape::T;
  using Params = SplitForwardParams;
  static constexpr int kMergeTurn = 1;  // a named barrier

  // The end of an item, prepared while its last product is in flight.
  struct Ending {
    WorkSlot slot;
    CombineTile combine;
    uint32_t* ticket = nullptr;  // null: parts are not merged here, or the tile has only one
    int64_t first;               // the thread's row in the partials
    int rows;                    // of the tile, including packed ones
    float lse[2];
    float weight[2];

    // Call it after OffsetsToBases of `states`.
    __device__ __forceinline__ Ending(const Params& params, const WorkSlot& item, int packed_row,
                                      const RowStates& states)
        : slot(item) {
      const ForwardParams& forward = params.forward;
      const int pack = forward.head_pack;
      const int packs = forward.common.num_heads / pack;
      const int packed_head = slot.first_head / pack;
      const int index = slot.valid - 2;  // of the tile's CombineTile
      if (params.tickets != nullptr && index >= 0) {
        combine = params.combines[index];
        ticket = params.tickets + index * params.heads + slot.batch * packs + packed_head;
      }
      first = ((int64_t{slot.tile.partial_slot} * forward.common.batch + slot.batch) * packs +
               packed_head) *
                  forward.tile_rows +
              packed_row;
      rows = slot.tile.q_rows * pack;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = QuadSum(states.sum[half]);
        lse[half] = RowLse(states.offset[half], sum);
        weight[half] = sum == 0.0f ? 0.0f : __frcp_rn(sum);
      }
    }
  };

  // Executed by the consumer group: stores the item's rows to its slot, or to the outputs if its
  // tile has no other parts. The last block that gets here with one of a tile's parts merges them.
  static __device__ __forceinline__ void Finish(const Params& params, const Ending& ending,
                                                int packed_row,
                                                const float (&output)[Shape::kDim / 2],
                                                const RowStates& states, char* memory) {
    const ForwardParams& forward = params.forward;
    if (ending.slot.tile.partial_slot < 0) {
      ForwardEpilogue<T, Shape::kDim>::Store(forward, ending.slot, packed_row, output, states);
      return;
    }
    const int q = threadIdx.x & 3;
    const int columns = forward.common.head_dim_v;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Most warps have no row: compares the first row of each.
      if ((packed_row & ~7) + half * 8 >= ending.rows) break;
      if (packed_row + half * 8 >= ending.rows) continue;
      const int64_t row = ending.first + half * 8;
      if (q == 0) forward.partial_lse[row] = ending.lse[half];
      float* const target = forward.partial_out + row * columns + q * 2;
#pragma unroll
      for (int n = 0; n < Shape::kDim / 8; ++n) {
        if (n * 8 + q * 2 >= columns) break;
        *reinterpret_cast<float2*>(target + n * 8) =
            make_float2(output[n * 4 + half * 2] * ending.weight[half],
                        output[n * 4 + half * 2 + 1] * ending.weight[half]);
      }
    }
    if (ending.ticket != nullptr) Merge(params, ending, memory);
  }

 private:
  static __device__ __forceinline__ void Merge(const Params& params, const Ending& ending,
                                               char* memory) {
    const CombineTile& combine = ending.combine;
    uint32_t* const last = reinterpret_cast<uint32_t*>(memory + Shape::kLastPart);
    SyncThreads<128>(kMergeTurn);
    if (threadIdx.x % 128 == 0) {
      *last = CountsLast(ending.ticket, combine.slot_end - combine.slot_begin);
    }
    SyncThreads<128>(kMergeTurn);
    if (*last == 0) return;
#pragma unroll 1
    for (int row = (threadIdx.x & 127) / 32; row < ending.rows; row += 4) {
      MergeRow<T>(params.forward, combine, ending.slot.first_head, ending.slot.batch, row);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_SPLIT_FORWARD_PRODUCTS_CUH_

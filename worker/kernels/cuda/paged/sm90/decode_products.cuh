// The end of an item of the decode kernel: the consumers store its rows or a partial result. The
// block that stores the last partial result of a unit merges all of them.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_DECODE_PRODUCTS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_DECODE_PRODUCTS_CUH_

#include <cstdint>

#include "worker/kernels/cuda/paged/merge_pieces.cuh"
#include "worker/kernels/cuda/paged/sm90/kernel_params.h"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"

namespace ringattn::worker::cuda::paged {

template <typename Shape>
struct DecodeProducts : cuda::sm90::ForwardProducts<Shape> {
  using T = typename Shape::T;
  using Params = DecodeParams;
  using RowStates = cuda::sm90::RowStates;
  using WorkSlot = cuda::sm90::WorkSlot;
  static constexpr int kMergeTurn = 1;  // a named barrier

  // How an item ends, as far as that is known while its last product is on its way.
  struct Ending {
    WorkSlot slot;
    PackedUnit unit;
    int64_t partial_row = 0;  // of the thread's upper row
    float lse[2];
    float weight[2];

    // `states` after OffsetsToBases.
    __device__ __forceinline__ Ending(const Params& params, const WorkSlot& item, int packed_row,
                                      const RowStates& states)
        : slot(item) {
      const ForwardParams& forward = params.forward;
      unit.first_q = item.tile.q_row_begin;
      unit.first_head = item.first_head;
      unit.pack_index = item.first_head / forward.head_pack;
      unit.first_slot = item.tile.range_begin;
      unit.pieces = item.tile.range_end;
      unit.rows = item.tile.q_rows * forward.head_pack;
      partial_row =
          PartialRow(forward, params.split.packs, item.tile.partial_slot, unit.pack_index) +
          packed_row;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = QuadSum(states.sum[half]);
        lse[half] = RowLse(states.offset[half], sum);
        weight[half] = sum == 0.0f ? 0.0f : __frcp_rn(sum);
      }
    }
  };

  // Executed by the consumer group.
  static __device__ __forceinline__ void Finish(const Params& params, const Ending& ending,
                                                int packed_row,
                                                const float (&output)[Shape::kDim / 2],
                                                const RowStates& states, char* memory) {
    const ForwardParams& forward = params.forward;
    if (ending.slot.tile.partial_slot < 0) {
      cuda::sm90::ForwardEpilogue<T, Shape::kDim>::Store(forward, ending.slot, packed_row, output,
                                                         states);
      return;
    }
    const int q = threadIdx.x & 3;
    const int columns = forward.common.head_dim_v;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (packed_row + half * 8 >= ending.unit.rows) continue;
      const int64_t row = ending.partial_row + half * 8;
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
    Merge(params, ending, memory);
  }

 private:
  static __device__ __forceinline__ void Merge(const Params& params, const Ending& ending,
                                               char* memory) {
    constexpr int kColumns = Shape::kPanels * 64;
    constexpr bool kWide = kColumns > 128;
    // Sm90Serves: head_dim_v is a multiple of 8.
    using Merging =
        MergeShape<kColumns, 4, (kColumns > 64) ? 4 : 2, kWide ? 8 : 16, kWide ? 2 : 4, 8>;
    const int64_t ticket =
        int64_t{ending.slot.valid - 1} * params.split.packs + ending.unit.pack_index;
    FinishPiece<T, Merging>(
        params.forward, params.split, ending.unit, ending.slot.tile.partial_slot, ticket,
        reinterpret_cast<uint32_t*>(memory + Shape::kLastPiece),
        static_cast<int>(threadIdx.x) % 128, [] { SyncThreads<128>(kMergeTurn); });
  }
};

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_DECODE_PRODUCTS_CUH_

// Writes a consumer warpgroup's rows from registers, merged with the previous partial.
//
// The four lanes that share a row first exchange 16-bit results, so that each lane writes 16 bytes.
// fp32 partials form whole sectors without an exchange.
//
// (The portable family's ForwardRow does the same for one row at a time. Here the flags are the
// same for all rows of an item; as members they made ptxas spill.)
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_EPILOGUE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_EPILOGUE_CUH_

#include "worker/kernels/cuda/primitives/forward_row.cuh"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_softmax.cuh"
#include "worker/kernels/cuda/sm90/primitives/quad_transpose.cuh"

namespace ringattn::worker::cuda::sm90 {

// The destination of an item's results: its split-KV slot, unmerged, or out_acc (out at the last
// step), merged with the previous partial.
struct ItemTarget {
  const ForwardParams& params;
  const WorkSlot& slot;
  bool partial, merge, final;

  __device__ __forceinline__ ItemTarget(const ForwardParams& given, const WorkSlot& item)
      : params(given),
        slot(item),
        partial(item.tile.partial_slot >= 0),
        merge(!partial && !given.initial),
        final(!partial && given.final) {}

  __device__ __forceinline__ bool Exists(int packed_row) const {
    return packed_row < slot.tile.q_rows * params.head_pack;
  }
  __device__ __forceinline__ int HeadOf(int packed_row) const {
    return slot.first_head + (params.head_pack == 1 ? 0 : packed_row % params.head_pack);
  }
  // Computes the index of the row's lse and of its first element over head_dim_v.
  __device__ __forceinline__ void Locate(int packed_row, int64_t& lse_row, int64_t& row) const {
    const CommonParams& common = params.common;
    const int pack = params.head_pack;
    if (partial) {
      const int packs = common.num_heads / pack;
      lse_row = row = ((int64_t{slot.tile.partial_slot} * common.batch + slot.batch) * packs +
                       slot.first_head / pack) *
                          params.tile_rows +
                      packed_row;
      return;
    }
    const int64_t q_row = slot.tile.q_row_begin + (pack == 1 ? packed_row : packed_row / pack);
    const int head = HeadOf(packed_row);
    lse_row = (int64_t{slot.batch} * common.num_heads + head) * common.q_rows + q_row;
    row = (slot.batch * common.q_rows + q_row) * common.num_heads + head;
  }
};

template <typename T, int kDim>
struct ForwardEpilogue {
  // Stores the thread's two rows, `packed_row` and `packed_row` + 8, of the unnormalised output.
  // Call it after OffsetsToBases of `states`.
  static __device__ __forceinline__ void Store(const ForwardParams& params, const WorkSlot& slot,
                                               int packed_row, const float (&output)[kDim / 2],
                                               const RowStates& states) {
    const int q = threadIdx.x & 3;
    const int columns = params.common.head_dim_v;
    const ItemTarget target(params, slot);
    float* const lse = target.partial ? params.partial_lse : params.lse;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = target.Exists(packed_row + half * 8);
      int64_t lse_row, row;
      target.Locate(packed_row + half * 8, lse_row, row);
      const float sum = QuadSum(states.sum[half]);
      float row_lse = RowLse(states.offset[half], sum);
      float weight = sum == 0.0f ? 0.0f : 1.0f / sum;
      float previous_weight = 0.0f;
      if (target.merge && exists) {
        const DeviceMerge merge = MergeDeviceLse(lse[lse_row], row_lse);
        previous_weight = merge.first;
        weight *= merge.second;
        row_lse = merge.lse;
      }
      if (params.sinks != nullptr && !target.partial && exists) {
        JoinSink(params.sinks[target.HeadOf(packed_row + half * 8)], row_lse, weight,
                 previous_weight);
      }
      __syncwarp();  // all lanes of a row have read the previous lse
      if (exists && q == 0) lse[lse_row] = row_lse;
      float* const acc = (target.partial ? params.partial_out : params.out_acc) + row * columns;
      T* const out = static_cast<T*>(params.out) + row * columns;
#pragma unroll
      for (int group = 0; group < kDim / 32; ++group) {
        uint32_t words[4];
        float2 previous[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = (group * 4 + j) * 8 + q * 2;
          previous[j] = make_float2(0.0f, 0.0f);
          if (target.merge && exists && column < columns) {
            previous[j] = *reinterpret_cast<const float2*>(acc + column);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = group * 4 + j;
          const int column = n * 8 + q * 2;
          const float x0 = fmaf(previous_weight, previous[j].x, output[n * 4 + half * 2] * weight);
          const float x1 =
              fmaf(previous_weight, previous[j].y, output[n * 4 + half * 2 + 1] * weight);
          if (!target.final && exists && column < columns) {
            *reinterpret_cast<float2*>(acc + column) = make_float2(x0, x1);
          }
          words[j] = Pack<T>(x0, x1);
        }
        if (target.final) {  // the same for all lanes of the warp
          TransposeQuad(words, q);
          const int column = (group * 4 + q) * 8;
          if (exists && column < columns) {
            *reinterpret_cast<uint4*>(out + column) =
                make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
        // Loading all groups at once would spill registers.
        asm volatile("" ::: "memory");
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_EPILOGUE_CUH_

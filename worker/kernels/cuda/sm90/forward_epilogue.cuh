// Writes a consumer warpgroup's rows from registers, merged with the previous partial.
//
// 16-bit results are exchanged within the four lanes that share a row first, so that each
// lane writes 16 bytes of it; fp32 partials are whole sectors as they stand.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_EPILOGUE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_EPILOGUE_CUH_

#include "worker/kernels/cuda/forward_epilogue.cuh"
#include "worker/kernels/cuda/sm90/forward_softmax.cuh"

namespace ringattn::cuda::sm90 {

// Lane q of a quad has w[j] of every j and gets w[q] of every lane: a 4 x 4 transposition
// in two rounds. All lanes of the warp take part.
__device__ __forceinline__ void TransposeQuad(uint32_t (&w)[4], int q) {
  const bool odd = q & 1;
  const uint32_t a = __shfl_xor_sync(0xffffffff, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffff, odd ? w[2] : w[3], 1);
  // Even lanes have rows 0 and 2 of lanes q, q + 1; odd lanes rows 1 and 3 of q - 1, q.
  const uint32_t x0 = odd ? a : w[0], x1 = odd ? w[1] : a;
  const uint32_t y0 = odd ? b : w[2], y1 = odd ? w[3] : b;
  const bool high = q & 2;
  const uint32_t c = __shfl_xor_sync(0xffffffff, high ? x0 : y0, 2);
  const uint32_t d = __shfl_xor_sync(0xffffffff, high ? x1 : y1, 2);
  w[0] = high ? c : x0;
  w[1] = high ? d : x1;
  w[2] = high ? y0 : c;
  w[3] = high ? y1 : d;
}

template <typename T, int kDim>
struct ForwardEpilogue {
  // The thread's two rows, `packed_row` and that plus 8, of the unnormalised output.
  static __device__ __forceinline__ void Store(const ForwardParams& params,
                                               const ForwardTile& tile, int first_head,
                                               int64_t batch, int packed_row,
                                               const float (&output)[kDim / 2],
                                               const RowStates& states) {
    const int q = threadIdx.x & 3;
    const bool final = params.final && tile.partial_slot < 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = QuadSum(states.sum[half]);
      const ForwardRow row(params, tile, first_head, batch, packed_row + half * 8,
                           RowLse(states.offset[half], sum), sum == 0.0f ? 0.0f : 1.0f / sum);
      __syncwarp();  // all lanes of a row have read the previous lse
      if (row.exists && q == 0) row.StoreLse();
#pragma unroll
      for (int group = 0; group < kDim / 32; ++group) {
        uint32_t words[4];
        float2 previous[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = (group * 4 + j) * 8 + q * 2;
          previous[j] = make_float2(0.0f, 0.0f);
          if (row.exists && row.read_previous && column < row.columns) {
            previous[j] = *reinterpret_cast<const float2*>(row.acc + row.offset + column);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = group * 4 + j;
          const int column = n * 8 + q * 2;
          const float x0 = fmaf(row.previous_weight, previous[j].x,
                                output[n * 4 + half * 2] * row.weight);
          const float x1 = fmaf(row.previous_weight, previous[j].y,
                                output[n * 4 + half * 2 + 1] * row.weight);
          if (row.exists && row.write_acc && column < row.columns) {
            *reinterpret_cast<float2*>(row.acc + row.offset + column) = make_float2(x0, x1);
          }
          words[j] = Pack<T>(x0, x1);
        }
        if (final) {  // the same for all lanes of the warp
          TransposeQuad(words, q);
          const int column = (group * 4 + q) * 8;
          if (row.exists && column < row.columns) {
            *reinterpret_cast<uint4*>(static_cast<T*>(row.out) + row.offset + column) =
                make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
        // Loads of all groups at once would spill.
        asm volatile("" ::: "memory");
      }
    }
  }
};

}  // namespace ringattn::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_EPILOGUE_CUH_

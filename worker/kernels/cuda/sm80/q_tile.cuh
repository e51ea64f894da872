// The forward's q tile in shared memory.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_Q_TILE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_Q_TILE_CUH_

#include <cstdint>

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/primitives/forward_row.cuh"
#include "worker/kernels/cuda/primitives/tile_copy.cuh"

namespace ringattn::worker::cuda::sm80 {

// Copies the q tile, including packed heads; rows that do not exist become zero.
template <typename T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void LoadQTile(uint32_t target, const ForwardParams& params,
                                          const ForwardTile& tile, int first_head, int64_t batch) {
  const CommonParams& common = params.common;
  const int rows = tile.q_rows * params.head_pack;
  if (params.head_pack == 1) {
    TileCopy<T, kDim, kRows, kThreads>::Load(
        target, threadIdx.x, QRow<T>(params, tile, first_head, batch, 0),
        int64_t{common.num_heads} * common.head_dim, rows, common.head_dim, common.vector_qk);
    return;
  }
  using Tile = SharedTile<kDim>;
#pragma unroll 1
  for (int index = threadIdx.x; index < kRows * kDim / 2; index += kThreads) {
    const int row = index / (kDim / 2);
    const int pair = index % (kDim / 2);
    uint32_t bits = 0;
    if (row < rows) {
      const uint16_t* from =
          reinterpret_cast<const uint16_t*>(QRow<T>(params, tile, first_head, batch, row)) +
          pair * 2;
      if (pair * 2 < common.head_dim) bits = from[0];
      if (pair * 2 + 1 < common.head_dim) bits |= static_cast<uint32_t>(from[1]) << 16;
    }
    asm volatile(
        "st.shared.b32 [%0], %1;" ::"r"(target + Tile::Offset(row, pair / 4) + (pair % 4) * 4),
        "r"(bits)
        : "memory");
  }
}

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_Q_TILE_CUH_

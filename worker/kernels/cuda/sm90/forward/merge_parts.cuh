// Merges one row of a tile whose keys were split, from the partials of its splits, within the
// kernel that computes them. (attention_combine in elementwise.cu does it in a later kernel.)
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_MERGE_PARTS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_MERGE_PARTS_CUH_

#include "worker/kernels/cuda/primitives/forward_row.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

// Partials of a row that a warp loads at once: the usual number (132 multiprocessors by 8 kv
// heads).
inline constexpr int kMergedAtOnce = 16;
inline constexpr int kMergedLses = kMostMergedParts / 32;  // that a lane holds
static_assert(kMostMergedParts % 32 == 0 && 32 % kMergedAtOnce == 0);

// Executed by one warp: merges a row of a tile from all its partials in the order of their slots,
// independent of the order in which they were written. Other blocks wrote them during this launch,
// so they are read from the L2 cache. REQUIRES: at most kMostMergedParts partials, with at most 128
// columns, a multiple of four.
template <typename T>
__device__ __forceinline__ void MergeRow(const ForwardParams& forward, const CombineTile& combine,
                                         int first_head, int batch, int row) {
  const CommonParams& common = forward.common;
  const int pack = forward.head_pack;
  const int packs = common.num_heads / pack;
  const int lane = threadIdx.x & 31;
  const int columns = common.head_dim_v;
  const int column = lane * 4;
  const int slots = combine.slot_end - combine.slot_begin;
  const int64_t slot_rows = int64_t{common.batch} * packs * forward.tile_rows;
  const int64_t first =
      ((int64_t{combine.slot_begin} * common.batch + batch) * packs + first_head / pack) *
          forward.tile_rows +
      row;
  float4 parts[kMergedAtOnce];
  const auto ask = [&](int chunk) {
    const float* source = forward.partial_out + (first + chunk * slot_rows) * columns + column;
#pragma unroll
    for (int i = 0; i < kMergedAtOnce; ++i, source += slot_rows * columns) {
      parts[i] = float4{};
      if (chunk + i < slots && column < columns) {
        parts[i] = __ldcg(reinterpret_cast<const float4*>(source));
      }
    }
  };
  float lses[kMergedLses];
  float max = NegativeInfinity();
#pragma unroll
  for (int i = 0; i < kMergedLses; ++i) {
    const int slot = i * 32 + lane;
    lses[i] = NegativeInfinity();
    if (slot < slots) lses[i] = __ldcg(forward.partial_lse + first + slot * slot_rows);
  }
  ask(0);
#pragma unroll
  for (int i = 0; i < kMergedLses; ++i) {
    max = lses[i] > max || lses[i] != lses[i] ? lses[i] : max;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffff, max, step);
    max = other > max || other != other ? other : max;
  }
  const float safe = max == NegativeInfinity() ? 0.0f : max;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMergedLses; ++i) {
    lses[i] = expf(lses[i] - safe);
    sum += lses[i];
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  const float lse = sum == 0.0f ? NegativeInfinity() : max + logf(sum);
  ForwardTile tile;
  tile.q_row_begin = combine.q_row_begin;
  tile.q_rows = combine.q_rows;
  tile.partial_slot = -1;
  ForwardRow target(forward, tile, first_head, batch, row, lse, sum == 0.0f ? 0.0f : 1.0f / sum);
  __syncwarp();  // all lanes have read the previous lse
  float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int chunk = 0; chunk < kMostMergedParts; chunk += kMergedAtOnce) {
    if (chunk >= slots) break;
    if (chunk > 0) ask(chunk);
#pragma unroll
    for (int i = 0; i < kMergedAtOnce; ++i) {
      const float weight = __shfl_sync(0xffffffff, lses[chunk / 32], chunk % 32 + i);
      x[0] = fmaf(weight, parts[i].x, x[0]);
      x[1] = fmaf(weight, parts[i].y, x[1]);
      x[2] = fmaf(weight, parts[i].z, x[2]);
      x[3] = fmaf(weight, parts[i].w, x[3]);
    }
  }
  target.template Store2<T>(column, x[0], x[1]);
  target.template Store2<T>(column + 2, x[2], x[3]);
  if (lane == 0) target.StoreLse();
}

// Increments `ticket`, which wraps to 0 after `count` increments, and returns true for the last of
// them. Releases the stores of the caller and of threads that it met at a barrier; acquires those
// of the threads that counted earlier.
__device__ __forceinline__ bool CountsLast(uint32_t* ticket, uint32_t count) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(ticket), "r"(count - 1)
               : "memory");
  return before == count - 1;
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_MERGE_PARTS_CUH_

// Merges the partial results of a unit whose keys several thread blocks share. The block that
// finishes last does so, within the launch that computes the pieces.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_MERGE_PIECES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_MERGE_PIECES_CUH_

#include <cstdint>

#include "worker/kernels/cuda/paged/step_params.h"
#include "worker/kernels/cuda/primitives/forward_row.cuh"
#include "worker/kernels/cuda/primitives/numerics.cuh"

namespace ringattn::worker::cuda::paged {

// One unit of one pack of heads.
struct PackedUnit {
  int64_t first_q = 0;  // in q and out
  int32_t rows = 0;     // queries times the heads of a pack
  int32_t first_head = 0;
  int32_t pack_index = 0;  // first_head / head_pack
  int32_t first_slot = 0;  // of piece 0
  int32_t pieces = 0;      // at most kMaxSplits
};

// The first element of a slot in ForwardParams::partial_lse: [slots, packs, tile_rows].
__device__ __forceinline__ int64_t PartialRow(const ForwardParams& forward, int32_t packs,
                                              int32_t slot, int32_t pack_index) {
  return (int64_t{slot} * packs + pack_index) * forward.tile_rows;
}

// Counts one of `pieces` at `ticket`, which the last one sets back to 0 and returns true for.
// Releases what the caller, and every thread that it met at a barrier before, has stored; acquires
// what those who counted earlier have released.
__device__ __forceinline__ bool CountPiece(uint32_t* ticket, uint32_t pieces) {
  uint32_t before;
#if __CUDA_ARCH__ >= 900
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(ticket), "r"(pieces - 1)
               : "memory");
#else
  __threadfence();
  before = atomicInc(ticket, pieces - 1);
  __threadfence();
#endif
  return before == pieces - 1;
}

// Merges packed rows first_row, first_row + row_step, ... of a unit, kRows of them as far as they
// exist, from all pieces in the order of their index. Executed by one warp. Reads from the L2
// cache, because other blocks have written the pieces during this launch.
//   kColumns  an upper bound of head_dim_v, a multiple of 32
//   kAtOnce   pieces that are asked for together, a divisor of 32
template <typename T, int kColumns, int kRows, int kAtOnce>
__device__ __forceinline__ void MergeRows(const ForwardParams& forward, int32_t packs,
                                          const PackedUnit& unit, int first_row, int row_step) {
  constexpr int kPerLane = kColumns / 32;
  constexpr int kLseCount = kMaxSplits / 32;
  static_assert(32 % kAtOnce == 0);
  const int lane = threadIdx.x & 31;
  const int columns = forward.common.head_dim_v;
  const int64_t unit_row = PartialRow(forward, packs, unit.first_slot, unit.pack_index) + first_row;
  const int64_t slot_rows = int64_t{packs} * forward.tile_rows;
  const auto place = [&](int piece, int r) {
    const int slots = PieceSlot(unit.first_slot, piece) - unit.first_slot;
    return unit_row + r * row_step + slots * slot_rows;
  };
  const auto exists = [&](int r) { return first_row + r * row_step < unit.rows; };

  float weights[kRows][kLseCount];  // lse first; lane l has pieces l, l + 32, ...
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLseCount; ++i) {
      const int piece = i * 32 + lane;
      weights[r][i] = NegativeInfinity();
      if (exists(r) && piece < unit.pieces) {
        weights[r][i] = __ldcg(forward.partial_lse + place(piece, r));
      }
    }
  }
  float lse[kRows], normalizer[kRows];
  float x[kRows][kPerLane] = {};
#pragma unroll 1
  for (int first = 0; first < unit.pieces; first += kAtOnce) {
    float parts[kRows][kAtOnce][kPerLane];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // One running pointer: an address for each load would take too many registers.
      const float* source = forward.partial_out + place(first, r) * columns + lane;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool present = exists(r) && first + i < unit.pieces;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          parts[r][i][j] = 0.0f;
          if (present && j * 32 + lane < columns) parts[r][i][j] = __ldcg(source + j * 32);
        }
        source += (first + i == 0 ? 1 : 2) * slot_rows * columns;
      }
    }
    if (first == 0) {
      // While these are on their way: each piece's share of its row. NaN wins, so that it reaches
      // the result.
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float max = NegativeInfinity();
#pragma unroll
        for (int i = 0; i < kLseCount; ++i) {
          max = weights[r][i] > max || weights[r][i] != weights[r][i] ? weights[r][i] : max;
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          const float other = __shfl_xor_sync(0xffffffff, max, step);
          max = other > max || other != other ? other : max;
        }
        const float base = max == NegativeInfinity() ? 0.0f : max;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kLseCount; ++i) {
          weights[r][i] = expf(weights[r][i] - base);
          sum += weights[r][i];
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        lse[r] = sum == 0.0f ? NegativeInfinity() : max + logf(sum);
        normalizer[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float of_lane = 0.0f;
#pragma unroll
      for (int i = 0; i < kLseCount; ++i) {
        if (first / 32 == i) of_lane = weights[r][i];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = __shfl_sync(0xffffffff, of_lane, first % 32 + i);
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) x[r][j] = fmaf(weight, parts[r][i][j], x[r][j]);
      }
    }
  }

  const CommonParams& common = forward.common;
  const int pack = forward.head_pack;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!exists(r)) break;
    const int row = first_row + r * row_step;
    const int head = unit.first_head + row % pack;
    const int64_t q_row = unit.first_q + row / pack;
    float unused = 0.0f;
    if (forward.sinks != nullptr) JoinSink(forward.sinks[head], lse[r], normalizer[r], unused);
    if (lane == 0) forward.lse[head * common.q_rows + q_row] = lse[r];
    const int64_t target = (q_row * common.num_heads + head) * columns;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int column = j * 32 + lane;
      if (column >= columns) continue;
      const float value = x[r][j] * normalizer[r];
      if (forward.final) {
        static_cast<T*>(forward.out)[target + column] = FromFloat<T>(value);
      } else {
        forward.out_acc[target + column] = value;
      }
    }
  }
}

// Merges a unit. Executed by kWarps warps, of which this is number `warp`. Few rows of many pieces
// are merged one by one, kFewAtOnce pieces at a time; many rows kManyRows at a time.
template <typename T, int kColumns, int kWarps, int kFewAtOnce, int kManyRows, int kManyAtOnce>
__device__ __forceinline__ void MergeUnit(const ForwardParams& forward, int32_t packs,
                                          const PackedUnit& unit, int warp) {
  if constexpr (kManyRows > 1) {
    const auto rounds = [&](int rows, int at_once) {
      return ((unit.rows - 1) / (kWarps * rows) + 1) * ((unit.pieces - 1) / at_once + 1);
    };
    if (rounds(kManyRows, kManyAtOnce) < rounds(1, kFewAtOnce)) {
#pragma unroll 1
      for (int row = warp; row < unit.rows; row += kWarps * kManyRows) {
        MergeRows<T, kColumns, kManyRows, kManyAtOnce>(forward, packs, unit, row, kWarps);
      }
      return;
    }
  }
#pragma unroll 1
  for (int row = warp; row < unit.rows; row += kWarps) {
    MergeRows<T, kColumns, 1, kFewAtOnce>(forward, packs, unit, row, kWarps);
  }
}

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_MERGE_PIECES_CUH_

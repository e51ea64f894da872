// Merges the partial results of a unit whose keys several thread blocks share. The block that
// finishes last does so, within the launch that computes the pieces; many pieces are merged in
// groups first (MergeGroups, work_split.h).
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

// Partial results of a unit that are merged together: those of pieces first, first + step, ...
struct MergedPieces {
  int32_t first = 0;
  int32_t step = 1;
  int32_t count = 0;
  bool final = true;  // false: the result replaces the partial result of piece `first`
};

// How the threads of a thread block merge.
//   kColumns     an upper bound of head_dim_v, a multiple of 32
//   kWarps       warps that merge together
//   kWidth       columns of one load: 1, 2 or 4, a divisor of head_dim_v
//   kFewAtOnce   pieces of one row that are asked for together, a divisor of 32
//   kManyRows    rows that a warp merges together if there are many, kManyAtOnce pieces of each at
//                a time; 1: never
template <int kColumns_, int kWarps_, int kWidth_, int kFewAtOnce_, int kManyRows_,
          int kManyAtOnce_>
struct MergeShape {
  static constexpr int kColumns = kColumns_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kFewAtOnce = kFewAtOnce_;
  static constexpr int kManyRows = kManyRows_;
  static constexpr int kManyAtOnce = kManyAtOnce_;
  static constexpr int kVectors = (kColumns + 32 * kWidth - 1) / (32 * kWidth);  // of a lane
  static_assert(32 % kFewAtOnce == 0 && 32 % kManyAtOnce == 0);
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

// kWidth floats, loaded and stored together. Loads read the L2 cache, because other thread blocks
// have written the pieces during this launch.
template <int kWidth>
__device__ __forceinline__ void LoadPartial(const float* source, float (&x)[kWidth]) {
  if constexpr (kWidth == 4) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(source));
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  } else if constexpr (kWidth == 2) {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(source));
    x[0] = v.x, x[1] = v.y;
  } else {
    x[0] = __ldcg(source);
  }
}
template <int kWidth>
__device__ __forceinline__ void StoreFloats(float* target, const float (&x)[kWidth]) {
  if constexpr (kWidth == 4) {
    *reinterpret_cast<float4*>(target) = make_float4(x[0], x[1], x[2], x[3]);
  } else if constexpr (kWidth == 2) {
    *reinterpret_cast<float2*>(target) = make_float2(x[0], x[1]);
  } else {
    *target = x[0];
  }
}

// Merges packed rows first_row, first_row + row_step, ... of a unit, kRows of them as far as they
// exist, from `merged` in the order of the pieces. Executed by one warp.
//   kMaxPieces  an upper bound of merged.count, a multiple of 32
template <typename T, typename Shape, int kRows, int kAtOnce, int kMaxPieces>
__device__ __forceinline__ void MergeRows(const ForwardParams& forward, int32_t packs,
                                          const PackedUnit& unit, const MergedPieces& merged,
                                          int first_row, int row_step) {
  constexpr int kWidth = Shape::kWidth;
  constexpr int kVectors = Shape::kVectors;
  constexpr int kLseCount = kMaxPieces / 32;
  const int lane = threadIdx.x & 31;
  const int columns = forward.common.head_dim_v;
  const int64_t unit_row = PartialRow(forward, packs, unit.first_slot, unit.pack_index) + first_row;
  const int64_t slot_rows = int64_t{packs} * forward.tile_rows;
  const auto place = [&](int index, int r) {
    const int slots = PieceSlot(0, merged.first + index * merged.step);
    return unit_row + r * row_step + slots * slot_rows;
  };
  const int64_t step_elements = 2 * merged.step * slot_rows * columns;
  const auto exists = [&](int r) { return first_row + r * row_step < unit.rows; };
  const auto column_of = [&](int vector) { return (vector * 32 + lane) * kWidth; };

  float weights[kRows][kLseCount];  // lse first; lane l has pieces l, l + 32, ...
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kLseCount; ++i) {
      const int index = i * 32 + lane;
      weights[r][i] = NegativeInfinity();
      if (exists(r) && index < merged.count) {
        weights[r][i] = __ldcg(forward.partial_lse + place(index, r));
      }
    }
  }
  float lse[kRows], normalizer[kRows];
  float x[kRows][kVectors][kWidth] = {};
#pragma unroll 1
  for (int first = 0; first < merged.count; first += kAtOnce) {
    float parts[kRows][kAtOnce][kVectors][kWidth];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // One running pointer: an address for each load would take too many registers.
      const float* source = forward.partial_out + place(first, r) * columns + lane * kWidth;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool present = exists(r) && first + i < merged.count;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) parts[r][i][j][e] = 0.0f;
          if (present && column_of(j) < columns) {
            LoadPartial<kWidth>(source + j * 32 * kWidth, parts[r][i][j]);
          }
        }
        // Piece 0 is half as far from the next one (PieceSlot).
        source += step_elements;
        if (i == 0 && merged.first + first == 0) source -= slot_rows * columns;
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
          if (i * 32 >= merged.count) break;
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
        if (first + i >= merged.count) break;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
#pragma unroll
          for (int e = 0; e < kWidth; ++e) {
            x[r][j][e] = fmaf(weight, parts[r][i][j][e], x[r][j][e]);
          }
        }
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
    if (merged.final && forward.sinks != nullptr) {
      JoinSink(forward.sinks[head], lse[r], normalizer[r], unused);
    }
    float* const lse_target = merged.final ? forward.lse + (head * common.q_rows + q_row)
                                           : forward.partial_lse + place(0, r);
    if (lane == 0) *lse_target = lse[r];
    float* const floats = merged.final ? forward.out_acc : forward.partial_out;
    const int64_t target = (merged.final ? q_row * common.num_heads + head : place(0, r)) * columns;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int column = column_of(j);
      if (column >= columns) continue;
      float values[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) values[e] = x[r][j][e] * normalizer[r];
      if (merged.final && forward.final) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          static_cast<T*>(forward.out)[target + column + e] = FromFloat<T>(values[e]);
        }
      } else {
        StoreFloats<kWidth>(floats + target + column, values);
      }
    }
  }
}

// Merges partial results of a unit. Executed by Shape::kWarps warps, of which this is number
// `warp`.
template <typename T, typename Shape>
__device__ __forceinline__ void MergeUnit(const ForwardParams& forward, int32_t packs,
                                          const PackedUnit& unit, const MergedPieces& merged,
                                          int warp) {
  constexpr int kWarps = Shape::kWarps;
  if constexpr (Shape::kManyRows > 1) {
    const auto rounds = [&](int rows, int at_once) {
      return ((unit.rows - 1) / (kWarps * rows) + 1) * ((merged.count - 1) / at_once + 1);
    };
    if (merged.count <= 32 &&
        rounds(Shape::kManyRows, Shape::kManyAtOnce) < rounds(1, Shape::kFewAtOnce)) {
#pragma unroll 1
      for (int row = warp; row < unit.rows; row += kWarps * Shape::kManyRows) {
        MergeRows<T, Shape, Shape::kManyRows, Shape::kManyAtOnce, 32>(forward, packs, unit, merged,
                                                                      row, kWarps);
      }
      return;
    }
  }
#pragma unroll 1
  for (int row = warp; row < unit.rows; row += kWarps) {
    MergeRows<T, Shape, 1, Shape::kFewAtOnce, kMaxSplits>(forward, packs, unit, merged, row,
                                                          kWarps);
  }
}

// Counts a piece whose partial result the calling threads have stored, and merges what is complete
// with it. Executed by Shape::kWarps warps together, `thread` being each one's number among them.
//   slot     of the piece
//   ticket   of the unit and its pack, in SplitParams::tickets
//   last     a word of shared memory that no thread reads before the first barrier
//   barrier  of these warps
template <typename T, typename Shape, typename Barrier>
__device__ __forceinline__ void FinishPiece(const ForwardParams& forward, const SplitParams& split,
                                            const PackedUnit& unit, int32_t slot, int64_t ticket,
                                            uint32_t* last, int thread, const Barrier& barrier) {
  const auto count_last = [&](uint32_t* counter, int32_t pieces) {
    barrier();  // the partial rows are stored, and `last` has been read
    if (thread == 0) *last = CountPiece(counter, static_cast<uint32_t>(pieces));
    barrier();
    return *last != 0;
  };
  const MergeGroups groups = MergeGroupsOf(unit.rows, unit.pieces);
  MergedPieces merged;
  merged.count = unit.pieces;
#pragma unroll 1
  for (bool in_group = groups.count > 1;; in_group = false) {
    uint32_t* counter = split.tickets + ticket;
    if (in_group) {
      const int32_t group = PieceIndex(unit.first_slot, slot) / groups.size;
      counter = split.group_tickets +
                int64_t{GroupTicketOf(unit.first_slot, groups, group)} * split.packs +
                unit.pack_index;
      merged.first = group * groups.size;
      merged.count = groups.PiecesOf(group, unit.pieces);
      merged.final = false;
    }
    if (!count_last(counter, merged.count)) return;
    MergeUnit<T, Shape>(forward, split.packs, unit, merged, thread / 32);
    if (!in_group) return;
    merged = {0, groups.size, groups.count, true};
  }
}

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_MERGE_PIECES_CUH_

// Whole tiles from global to shared memory, by all threads of a group.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_TILE_COPY_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_TILE_COPY_CUH_

#include <cstdint>

#include "worker/kernels/cuda/primitives/copy_async.cuh"
#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"

namespace ringattn::worker::cuda {

// Copies kRows rows of a token-major tensor into a tile with 16-byte copies:
// neighbouring threads take the chunks of one row, then rows. A thread's source
// position differs between tiles only by the tile's origin, so that callers keep
// one running pointer: origin + ThreadOffset(thread, row_stride).
template <typename T, int kColumns, int kRows, int kThreads>
struct TileCopy {
  using Tile = SharedTile<kColumns>;
  static constexpr int kGroup = Tile::kWide ? 8 : 4;  // chunks that are permuted together
  static constexpr int kRowsPerPass = kThreads / kGroup;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kRows % kRowsPerPass == 0 && kRowsPerPass % 8 == 0);

  static __device__ __forceinline__ int64_t ThreadOffset(unsigned thread, int64_t row_stride) {
    return thread / kGroup * row_stride + thread % kGroup * 8;
  }

  // Rows from valid_rows on and columns from `columns` on become zero, so that
  // garbage times a zero probability never yields NaN. Complete after
  // CommitCopies, WaitCopies and a barrier.
  static __device__ __forceinline__ void Start(uint32_t tile, unsigned thread,
                                               const T* thread_source, int64_t row_stride,
                                               int valid_rows, int columns) {
    KeepHere(thread);
    const int row = thread / kGroup;
    const int chunk = thread % kGroup;
    const uint32_t target = tile + Tile::Offset(row, chunk);
    if (valid_rows >= kRows && columns == kColumns) {  // the usual case, in half the instructions
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
        for (int group = 0; group < Tile::kChunks / kGroup; ++group) {
          CopyAsync16(target + pass * kRowsPerPass * Tile::kRowBytes + group * kGroup * 16,
                      thread_source + group * kGroup * 8);
        }
        thread_source += kRowsPerPass * row_stride;
      }
      return;
    }
    const int rows_left = valid_rows - row;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int group = 0; group < Tile::kChunks / kGroup; ++group) {
        const bool valid =
            pass * kRowsPerPass < rows_left && (group * kGroup + chunk) * 8 < columns;
        CopyAsync16(target + pass * kRowsPerPass * Tile::kRowBytes + group * kGroup * 16,
                    thread_source + group * kGroup * 8, valid);
      }
      thread_source += kRowsPerPass * row_stride;
    }
  }

  // The same by element accesses, for any alignment; `source` is the origin. Complete after a
  // barrier.
  static __device__ __noinline__ void CopyUnaligned(uint32_t tile, unsigned thread, const T* source,
                                                    int64_t row_stride, int valid_rows,
                                                    int columns) {
    for (int index = thread; index < kRows * Tile::kChunks * 4; index += kThreads) {
      const int row = index / (Tile::kChunks * 4);
      const int pair = index % (Tile::kChunks * 4);
      uint32_t bits = 0;
      if (row < valid_rows) {
        const uint16_t* from =
            reinterpret_cast<const uint16_t*>(source + row * row_stride) + pair * 2;
        if (pair * 2 < columns) bits = from[0];
        if (pair * 2 + 1 < columns) bits |= static_cast<uint32_t>(from[1]) << 16;
      }
      asm volatile(
          "st.shared.b32 [%0], %1;" ::"r"(tile + Tile::Offset(row, pair / 4) + (pair % 4) * 4),
          "r"(bits)
          : "memory");
    }
  }

  // Loads consecutive tiles by either method if the threads are the whole block. First returns the
  // running source of the first tile; each later copy advances it.
  static __device__ __forceinline__ const T* First(const T* origin, unsigned thread,
                                                   int64_t row_stride, bool vector) {
    return vector ? origin + ThreadOffset(thread, row_stride) : origin;
  }
  static __device__ __forceinline__ void Next(uint32_t tile, unsigned thread, const T*& source,
                                              int64_t row_stride, int valid_rows, int columns,
                                              bool vector) {
    if (vector) {
      Start(tile, thread, source, row_stride, valid_rows, columns);
    } else {
      CopyUnaligned(tile, threadIdx.x, source, row_stride, valid_rows, columns);
    }
    source += kRows * row_stride;
  }

  // Loads one tile by either method; `source` is the origin.
  static __device__ __forceinline__ void Load(uint32_t tile, unsigned thread, const T* source,
                                              int64_t row_stride, int valid_rows, int columns,
                                              bool vector) {
    if (vector) {
      Start(tile, thread, source + ThreadOffset(thread, row_stride), row_stride, valid_rows,
            columns);
    } else {
      CopyUnaligned(tile, thread, source, row_stride, valid_rows, columns);
    }
  }
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_TILE_COPY_CUH_

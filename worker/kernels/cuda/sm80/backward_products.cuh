// The tensor-core products of the backward, distributed over the warps of a group. Bases are a
// thread's ldmatrix positions (the table in primitives/mma.cuh) of its warp's first groups of 16
// rows and columns.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_PRODUCTS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_PRODUCTS_CUH_

#include "worker/kernels/cuda/primitives/mma.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"

namespace ringattn::worker::cuda::sm80 {

// The first row and column of a thread of a group in an accumulator with kRowWarps warps along the
// rows.
template <int kRowWarps>
__device__ __forceinline__ int LaneRow(unsigned thread) {
  return static_cast<int>((thread >> 5) % kRowWarps * 16 + (thread & 31) / 4);
}
template <int kRowWarps>
__device__ __forceinline__ int LaneColumn(unsigned thread) {
  return static_cast<int>((thread >> 5) / kRowWarps * 16 + (thread & 3) * 2);
}

template <typename Shape>
struct BackwardProducts {
  using T = typename Shape::T;
  using Tile = typename Shape::Tile;
  using ScoreTile = typename Shape::ScoreTile;
  using ScoreAccumulator = typename Shape::ScoreAccumulator;
  using KvAccumulator = typename Shape::KvAccumulator;
  using QAccumulator = typename Shape::QAccumulator;

  // acc = a b^T over the head dim; a and b are row-major tiles.
  static __device__ __forceinline__ void ScoreProduct(ScoreAccumulator& acc, uint32_t a_base,
                                                      uint32_t b_base) {
    KeepHere(a_base);
    KeepHere(b_base);
#pragma unroll
    for (int step = 0; step < Shape::kDim / 16; ++step) {
      uint32_t a[Shape::kScoreM][4];
#pragma unroll
      for (int m = 0; m < Shape::kScoreM; ++m) {
        LoadMatrices(a[m],
                     Tile::Step(a_base, step) + m * Shape::kScoreWarps * 16 * Tile::kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < Shape::kScoreN; ++n) {
        uint32_t b[4];
        LoadMatrices(
            b, Tile::Step(b_base, step) + n * Shape::kScoreColumnWarps * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < Shape::kScoreM; ++m) {
          Product(step == 0, acc[m][2 * n], a[m], b[0], b[1]);
          Product(step == 0, acc[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // acc += scores^T b over the q rows of the tile.
  static __device__ __forceinline__ void KvProduct(KvAccumulator& acc, uint32_t score_base,
                                                   uint32_t b_base) {
    KeepHere(score_base);
    KeepHere(b_base);
#pragma unroll
    for (int step = 0; step < Shape::kRows / 16; ++step) {
      uint32_t a[Shape::kKvM][4];
#pragma unroll
      for (int m = 0; m < Shape::kKvM; ++m) {
        LoadMatricesTransposed(a[m], ScoreTile::Step(score_base, m * Shape::kKvWarps) +
                                         step * 16 * ScoreTile::kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < Shape::kKvN; ++n) {
        uint32_t b[4];
        LoadMatricesTransposed(
            b, Tile::Step(b_base, n * Shape::kKvColumnWarps) + step * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < Shape::kKvM; ++m) {
          MultiplyAdd<T>(acc[m][2 * n], a[m], b[0], b[1]);
          MultiplyAdd<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // acc = dS k for the columns of a pass.
  static __device__ __forceinline__ void QProduct(QAccumulator& acc, uint32_t score_base,
                                                  uint32_t k_base) {
    KeepHere(score_base);
    KeepHere(k_base);
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      uint32_t a[Shape::kQM][4];
#pragma unroll
      for (int m = 0; m < Shape::kQM; ++m) {
        LoadMatrices(a[m], ScoreTile::Step(score_base, step) +
                               m * Shape::kQWarps * 16 * ScoreTile::kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < Shape::kQN; ++n) {
        uint32_t b[4];
        LoadMatricesTransposed(
            b, Tile::Step(k_base, n * Shape::kQColumnWarps) + step * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < Shape::kQM; ++m) {
          Product(step == 0, acc[m][2 * n], a[m], b[0], b[1]);
          Product(step == 0, acc[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

 private:
  // `fresh` is known at compile time once the caller's loop is unrolled.
  static __device__ __forceinline__ void Product(bool fresh, float (&d)[4], const uint32_t (&a)[4],
                                                 uint32_t b0, uint32_t b1) {
    if (fresh) {
      MultiplyAdd<T, true>(d, a, b0, b1);
    } else {
      MultiplyAdd<T>(d, a, b0, b1);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_PRODUCTS_CUH_

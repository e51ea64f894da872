// The tensor-core products of one warp in the wide forward. Bases are the lane's ldmatrix positions
// (the table in primitives/mma.cuh) in its pair's rows and its halves.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_PRODUCTS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_PRODUCTS_CUH_

#include <cstdint>

#include "worker/kernels/cuda/primitives/mma.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename Shape>
struct ForwardWideProducts {
  using T = typename Shape::T;
  using Tile = typename Shape::Tile;
  using Scores = typename Shape::Scores;
  using Output = typename Shape::Output;
  using QFragments = typename Shape::QFragments;
  static constexpr int kRowTiles = Shape::kRowTiles;

  // scores = q k^T for half of the keys.
  static __device__ __forceinline__ void ScoreProduct(Scores& scores, const QFragments& q_fragments,
                                                      uint32_t q_base, uint32_t k_base) {
    KeepHere(q_base);
    KeepHere(k_base);
    uint32_t a[kRowTiles][4];
    uint32_t b[Shape::kKeySteps][4];
    LoadScoreStep<0>(a, b, q_fragments, q_base, k_base);
    ScoreStep<0>(scores, a, b, q_fragments, q_base, k_base);
  }

  // Loads the fragments of q that stay in registers.
  static __device__ __forceinline__ void HoldQ(QFragments& fragments, uint32_t q_base) {
    HoldQStep<0>(fragments, q_base);
  }

  // output += P V for half of the keys. `load_p(step, a)` gets the A fragments of a
  // group of 16 keys; `between(i)` runs after the i-th of Shape::kKeySteps * Shape::kColumnSteps
  // groups of products.
  template <typename LoadP, typename Between>
  static __device__ __forceinline__ void ValueProduct(Output& output, uint32_t v_base,
                                                      const LoadP& load_p, const Between& between) {
    constexpr int kCount = Shape::kKeySteps * Shape::kColumnSteps;
    KeepHere(v_base);
    const auto load_v = [&](int i, uint32_t(&b)[4]) {
      LoadMatricesTransposed(b, Tile::Step(v_base, 2 * (i % Shape::kColumnSteps)) +
                                    i / Shape::kColumnSteps * 32 * Tile::kRowBytes);
    };
    uint32_t a[2][kRowTiles][4];
    uint32_t b[Shape::kAhead + 1][4];
    load_p(0, a[0]);
#pragma unroll
    for (int i = 0; i < Shape::kAhead; ++i) load_v(i, b[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int step = i / Shape::kColumnSteps;
      const int column = i % Shape::kColumnSteps;
      if (i + Shape::kAhead < kCount)
        load_v(i + Shape::kAhead, b[(i + Shape::kAhead) % (Shape::kAhead + 1)]);
      if (column + Shape::kAhead == Shape::kColumnSteps && step + 1 < Shape::kKeySteps) {
        load_p(step + 1, a[(step + 1) % 2]);
      }
      const uint32_t(&v)[4] = b[i % (Shape::kAhead + 1)];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        MultiplyAdd<T>(output[m][2 * column], a[step % 2][m], v[0], v[1]);
        MultiplyAdd<T>(output[m][2 * column + 1], a[step % 2][m], v[2], v[3]);
      }
      between(i);
    }
  }

 private:
  template <int kStep>
  static __device__ __forceinline__ void HoldQStep(QFragments& fragments, uint32_t q_base) {
    if constexpr (kStep < Shape::kQSteps) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        LoadMatrices(fragments[kStep][m], Tile::Step(q_base, kStep) + m * 16 * Tile::kRowBytes);
      }
      HoldQStep<kStep + 1>(fragments, q_base);
    }
  }

  template <int kStep>
  static __device__ __forceinline__ void LoadScoreStep(uint32_t (&a)[kRowTiles][4],
                                                       uint32_t (&b)[Shape::kKeySteps][4],
                                                       const QFragments& q_fragments,
                                                       uint32_t q_base, uint32_t k_base) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (kStep < Shape::kQSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = q_fragments[kStep][m][i];
      } else {
        LoadMatrices(a[m], Tile::Step(q_base, kStep) + m * 16 * Tile::kRowBytes);
      }
    }
#pragma unroll
    for (int n = 0; n < Shape::kKeySteps; ++n) {
      LoadMatrices(b[n], Tile::Step(k_base, kStep) + n * 32 * Tile::kRowBytes);
    }
  }

  // Continues scores = q k^T from step kStep, whose fragments are in `a` and `b`; the next step's
  // fragments are loaded during its products.
  template <int kStep>
  static __device__ __forceinline__ void ScoreStep(Scores& scores,
                                                   const uint32_t (&a)[kRowTiles][4],
                                                   const uint32_t (&b)[Shape::kKeySteps][4],
                                                   const QFragments& q_fragments, uint32_t q_base,
                                                   uint32_t k_base) {
    uint32_t next_a[kRowTiles][4];
    uint32_t next_b[Shape::kKeySteps][4];
    if constexpr (kStep + 1 < Shape::kDimSteps) {
      LoadScoreStep<kStep + 1>(next_a, next_b, q_fragments, q_base, k_base);
    }
#pragma unroll
    for (int n = 0; n < Shape::kKeySteps; ++n) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        MultiplyAdd<T, kStep == 0>(scores[m][2 * n], a[m], b[n][0], b[n][1]);
        MultiplyAdd<T, kStep == 0>(scores[m][2 * n + 1], a[m], b[n][2], b[n][3]);
      }
    }
    if constexpr (kStep + 1 < Shape::kDimSteps) {
      ScoreStep<kStep + 1>(scores, next_a, next_b, q_fragments, q_base, k_base);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_PRODUCTS_CUH_

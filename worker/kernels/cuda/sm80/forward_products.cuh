// The tensor-core products of the forward, of one warp: S = q k^T and O += P V. Bases are the
// lane's ldmatrix positions (the table in primitives/mma.cuh) in its warp's rows.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_PRODUCTS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_PRODUCTS_CUH_

#include <cstdint>

#include "worker/kernels/cuda/primitives/mma.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename Shape>
struct ForwardProducts {
  using T = typename Shape::T;
  using Tile = typename Shape::Tile;
  using QFragments = typename Shape::QFragments;
  static constexpr int kRowTiles = Shape::kRowTiles;

  // scores = q k^T; takes q from `q_fragments` if the shape keeps it in registers.
  static __device__ __forceinline__ void ScoreProduct(typename Shape::Scores& scores,
                                                      const QFragments& q_fragments,
                                                      uint32_t q_base, uint32_t k_base) {
    ScoreStep<0>(scores, q_fragments, q_base, k_base);
  }

  static __device__ __forceinline__ void LoadQ(QFragments& fragments, uint32_t q_base) {
    LoadQStep<0>(fragments, q_base);
  }

  // output += probabilities of the 16 keys from 16 * key_step on times their values.
  static __device__ __forceinline__ void ValueProduct(typename Shape::Output& output,
                                                      const typename Shape::Probabilities& p,
                                                      int key_step, uint32_t v_base) {
    ValueStep<0>(output, p, key_step, v_base);
  }

 private:
  template <int kStep>
  static __device__ __forceinline__ void ScoreStep(typename Shape::Scores& scores,
                                                   const QFragments& q_fragments, uint32_t q_base,
                                                   uint32_t k_base) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (Shape::kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = q_fragments[m][kStep][i];
      } else {
        LoadMatrices(a[m], Tile::Step(q_base, kStep) + m * 16 * Tile::kRowBytes);
      }
    }
#pragma unroll
    for (int n = 0; n < Shape::kKeySteps; ++n) {
      uint32_t b[4];
      LoadMatrices(b, Tile::Step(k_base, kStep) + n * 16 * Tile::kRowBytes);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        MultiplyAdd<T, kStep == 0>(scores[m][2 * n], a[m], b[0], b[1]);
        MultiplyAdd<T, kStep == 0>(scores[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
    if constexpr (kStep + 1 < Shape::kDimSteps) {
      ScoreStep<kStep + 1>(scores, q_fragments, q_base, k_base);
    }
  }

  template <int kStep>
  static __device__ __forceinline__ void LoadQStep(QFragments& fragments, uint32_t q_base) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      LoadMatrices(fragments[m][kStep], Tile::Step(q_base, kStep) + m * 16 * Tile::kRowBytes);
    }
    if constexpr (kStep + 1 < Shape::kDimSteps) LoadQStep<kStep + 1>(fragments, q_base);
  }

  template <int kColumnStep>
  static __device__ __forceinline__ void ValueStep(typename Shape::Output& output,
                                                   const typename Shape::Probabilities& p,
                                                   int key_step, uint32_t v_base) {
    uint32_t b[4];
    LoadMatricesTransposed(b, Tile::Step(v_base, kColumnStep) + key_step * 16 * Tile::kRowBytes);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      MultiplyAdd<T>(output[m][2 * kColumnStep], p[m], b[0], b[1]);
      MultiplyAdd<T>(output[m][2 * kColumnStep + 1], p[m], b[2], b[3]);
    }
    if constexpr (kColumnStep + 1 < Shape::kDimSteps) {
      ValueStep<kColumnStep + 1>(output, p, key_step, v_base);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_PRODUCTS_CUH_

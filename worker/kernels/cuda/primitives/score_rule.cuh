// The score rule: what a product q k becomes before the softmax, in log2 units, and what the
// derivative of that is. Kernels apply it at one point each, between their first product and
// their mask; whatever else changes scores belongs here, with its derivative beside it.
//   s = scale dot                          derivative (of the scaled product) 1
//   s = cap tanh(scale dot / cap)          derivative 1 - tanh^2
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_SCORE_RULE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_SCORE_RULE_CUH_

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/primitives/numerics.cuh"

namespace ringattn::worker::cuda {

// The soft cap of the tensor-core kernels, in two steps that share the tangent.
struct Softcap {
  float inner;     // of the product, inside the tangent
  float cap_log2;  // of the tangent

  explicit __device__ __forceinline__ Softcap(const CommonParams& common)
      : inner(common.softcap > 0.0f ? common.softmax_scale / common.softcap : 0.0f),
        cap_log2(common.softcap * kLog2E) {}

  __device__ __forceinline__ float Tangent(float dot) const { return Tanh(dot * inner); }
  __device__ __forceinline__ float Score(float tangent) const { return cap_log2 * tangent; }
  static __device__ __forceinline__ float Derivative(float tangent) {
    return 1.0f - tangent * tangent;
  }
};

// Scores from here on (log2 units; a row's lse in natural ones) are wide: fp32 holds them in steps
// of 2^-6 and more, so that what is subtracted from one must have been rounded like it. Rows whose
// largest score is wide take the slower way that does so; docs/numerics.md has what holds there.
inline constexpr float kWide = 131072.0f;
inline constexpr float kLargestFloat = 3.402823466e38f;

__device__ __forceinline__ bool IsWide(float x) { return fabsf(x) >= kWide; }

// score * multiplier in log2 units, rounded; the largest fp32 where a finite score has no product
// in it.
__device__ __forceinline__ float WideScore(float score, float multiplier) {
  const float x = __fmul_rn(score, multiplier);
  return fabsf(x) > kLargestFloat && fabsf(score) <= kLargestFloat ? copysignf(kLargestFloat, x)
                                                                   : x;
}

// Natural logarithm of a row's probability, from its score in log2 units: at most 0, and exactly 0
// for the only key of a row. lse is finite.
__device__ __forceinline__ float WideLogProbability(float score_log2, float lse) {
  const float x = __fsub_rn(__fmul_rn(score_log2, kLn2), lse);
  return x > 0.0f ? 0.0f : x;  // NaN stays NaN
}

// The whole rule in fp32 accuracy, for kernels that have the time.
struct ExactScore {
  float score;  // log2 units
  float derivative;

  __device__ __forceinline__ ExactScore(float dot, const CommonParams& common)
      : score(WideScore(dot, common.scale_log2)), derivative(1.0f) {
    if (common.softcap <= 0.0f) return;
    const float tangent = tanhf(dot * common.softmax_scale / common.softcap);
    score = common.softcap * tangent * kLog2E;
    derivative = Softcap::Derivative(tangent);
  }
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_SCORE_RULE_CUH_

// The score rule converts a product q k to a score in log2 units before the softmax, and defines
// the derivative of that conversion. Kernels apply it at one point each, between their first
// product and their mask. Other changes of scores belong here, together with their derivatives.
//   s = scale dot                          derivative (of the scaled product) 1
//   s = cap tanh(scale dot / cap)          derivative 1 - tanh^2
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_SCORE_RULE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_SCORE_RULE_CUH_

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/primitives/numerics.cuh"

namespace ringattn::worker::cuda {

// The soft cap of the tensor-core kernels, in two steps that share the tanh.
struct Softcap {
  float inner;     // multiplies the product inside the tanh
  float cap_log2;  // multiplies the tanh

  explicit __device__ __forceinline__ Softcap(const CommonParams& common)
      : inner(common.softcap > 0.0f ? common.softmax_scale / common.softcap : 0.0f),
        cap_log2(common.softcap * kLog2E) {}

  __device__ __forceinline__ float Tangent(float dot) const { return Tanh(dot * inner); }
  __device__ __forceinline__ float Score(float tangent) const { return cap_log2 * tangent; }
  static __device__ __forceinline__ float Derivative(float tangent) {
    return 1.0f - tangent * tangent;
  }
};

// Scores from this size on (log2 units; a row's lse in natural units) are wide: fp32 holds them in
// steps of 2^-6 or more, so a value subtracted from a score must have been rounded in the same way.
// Rows whose largest score is wide take a slower path that ensures this; docs/numerics.md describes
// the bounds.
inline constexpr float kWide = 131072.0f;
inline constexpr float kLargestFloat = 3.402823466e38f;

__device__ __forceinline__ bool IsWide(float x) { return fabsf(x) >= kWide; }

// Returns score * multiplier in log2 units, rounded. Returns the largest fp32 if the product of a
// finite score overflows.
__device__ __forceinline__ float WideScore(float score, float multiplier) {
  const float x = __fmul_rn(score, multiplier);
  return fabsf(x) > kLargestFloat && fabsf(score) <= kLargestFloat ? copysignf(kLargestFloat, x)
                                                                   : x;
}

// Returns the natural logarithm of a row's probability from its score in log2 units: at most 0, and
// exactly 0 for the only key of a row. lse is finite.
__device__ __forceinline__ float WideLogProbability(float score_log2, float lse) {
  const float x = __fsub_rn(__fmul_rn(score_log2, kLn2), lse);
  return x > 0.0f ? 0.0f : x;  // NaN stays NaN
}

// The whole rule in fp32 accuracy, for kernels that are not limited by its cost.
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

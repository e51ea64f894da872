// Transfers a bias through shared memory: a producer fills a ring of panels by the copy engine,
// before their scores, and a consumer group adds them.
//
// Panels have rows of 128 bytes in the 128-byte swizzle: the 16-byte chunk c of row r is at c ^ (r
// mod 8). 16-bit elements are read by ldmatrix, whose fragments match the scores' accumulators;
// eight rows of a fragment are eight chunks in different banks. A bias of -inf hides its pair for
// any product, including NaN. To make this free for other biases, the code computes the least
// element of a panel, and processes the scores again only if it is -inf.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BIAS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BIAS_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// Returns the copy engine's column for a column of the bias.
__device__ __forceinline__ int BiasColumn(const BiasMap& bias, int64_t column) {
  const uint32_t from = static_cast<uint32_t>(column - bias.first);
  if (bias.stride == 1) return static_cast<int>(from);
  const uint32_t stride = bias.stride;
  return static_cast<int>(from % stride * bias.class_columns + from / stride);
}

__device__ __forceinline__ int BiasPlane(const TermParams& terms, int num_heads, int batch,
                                         int head) {
  return (terms.bias_per_batch ? batch : 0) * (terms.bias_per_head ? num_heads : 1) +
         (terms.bias_per_head ? head : 0);
}

// Returns the L2 cache policy of the bias: heads that share a plane read it again.
__device__ __forceinline__ uint64_t BiasPolicy(const TermParams& terms) {
  return terms.bias_per_head ? kEvictFirst : kEvictLast;
}

// Returns the smaller of two pairs, half by half; NaN is ignored.
template <typename T>
__device__ __forceinline__ uint32_t LesserPairs(uint32_t a, uint32_t b) {
  uint32_t least;
  if constexpr (__is_same(T, __half)) {
    asm("min.f16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  } else {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  }
  return least;
}
template <typename T>
__device__ __forceinline__ bool HasNegativeInfinity(uint32_t pair) {
  const float2 x = Unpack<T>(pair);
  return x.x == NegativeInfinity() || x.y == NegativeInfinity();
}

// Loads four 8 x 8 matrices of 16-bit elements; lane l gives the row of matrix l / 8 at `row`.
// Transposed, a lane gets two elements of a column instead of two of a row.
template <bool kTransposed>
__device__ __forceinline__ void LoadMatrices(uint32_t row, uint32_t (&words)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row));
  }
}
__device__ __forceinline__ float2 LoadFloats(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
__device__ __forceinline__ float LoadFloat(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}

// A consumer warp's position in its group's ring of kCount panels of kBytes.
template <int kCount, int kBytes>
struct BiasRing {
  const uint32_t panels;       // shared addresses: of the first panel,
  const uint32_t full, empty;  // and of the first barriers
  RingPosition<kCount> at;

  __device__ __forceinline__ uint32_t Await() const {
    WaitBarrier(full + 8 * at.stage, at.phase);
    return panels + at.stage * kBytes;
  }
  // All lanes of the warp have read the panel.
  __device__ __forceinline__ void Leave() {
    ArriveWarp(empty + 8 * at.stage, threadIdx.x & 31);
    at.Advance();
  }
};

// For kernels without a bias.
template <typename Shape>
struct NoBias {
  __device__ __forceinline__ NoBias(uint32_t, int) {}
};

// A group's 64 q rows by kKeys keys, in the layout of forward_softmax.cuh.
template <typename Shape>
struct ForwardBias {
  using T = typename Shape::T;
  using Scores = float[Shape::kKeys / 2];
  BiasRing<Shape::kBiasStages, Shape::kBiasPanelBytes> ring;

  __device__ __forceinline__ ForwardBias(uint32_t shared, int group)
      : ring{shared + Shape::kBias + group * Shape::kBiasStages * Shape::kBiasPanelBytes,
             shared + Shape::kBiasFull + group * Shape::kBiasStages * 8,
             shared + Shape::kBiasEmpty + group * Shape::kBiasStages * 8,
             {}} {}

  // scores = factor * scores + bias. Executed by whole warps.
  __device__ __forceinline__ void Add(Scores& scores, float factor, DType dtype) {
    if (dtype == DType::kFloat32) {
#pragma unroll
      for (int panel = 0; panel < Shape::kKeys / 32; ++panel) {
        AddFloats(scores + panel * 16, factor, ring.Await());
        ring.Leave();
      }
    } else {
#pragma unroll
      for (int panel = 0; panel < Shape::kKeys / 64; ++panel) {
        AddPairs(scores + panel * 32, factor, ring.Await());
        ring.Leave();
      }
    }
  }

 private:
  static __device__ __forceinline__ int Warp() { return threadIdx.x / 32 % 4; }

  // Adds eight blocks of eight columns, two at a time: matrices of rows 0 and 8 of both.
  static __device__ __forceinline__ void AddPairs(float* scores, float factor, uint32_t panel) {
    const int lane = threadIdx.x & 31;
    const uint32_t rows =
        panel + (Warp() * 16 + lane / 8 % 2 * 8 + lane % 8) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
    uint32_t least = 0;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint32_t words[4];
      LoadMatrices<false>(rows ^ (m * 32), words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // block 2 m + j / 2, row half j % 2
        const float2 bias = Unpack<T>(words[j]);
        float* const pair = scores + (2 * m + j / 2) * 4 + j % 2 * 2;
        pair[0] = fmaf(pair[0], factor, bias.x);
        pair[1] = fmaf(pair[1], factor, bias.y);
        least = LesserPairs<T>(least, words[j]);
      }
    }
    if (!__any_sync(0xffffffff, HasNegativeInfinity<T>(least))) return;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint32_t words[4];
      LoadMatrices<false>(rows ^ (m * 32), words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 bias = Unpack<T>(words[j]);
        float* const pair = scores + (2 * m + j / 2) * 4 + j % 2 * 2;
        if (bias.x == NegativeInfinity()) pair[0] = bias.x;
        if (bias.y == NegativeInfinity()) pair[1] = bias.y;
      }
    }
  }

  // Adds four blocks of eight columns.
  static __device__ __forceinline__ void AddFloats(float* scores, float factor, uint32_t panel) {
    const int lane = threadIdx.x & 31;
    const uint32_t row =
        panel + (Warp() * 16 + lane / 4) * 128 + ((lane % 4 / 2) ^ (lane / 4)) * 16 + lane % 2 * 8;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 bias = LoadFloats((row ^ (n * 32)) + half * 8 * 128);
        float* const pair = scores + n * 4 + half * 2;
        pair[0] = bias.x == NegativeInfinity() ? bias.x : fmaf(pair[0], factor, bias.x);
        pair[1] = bias.y == NegativeInfinity() ? bias.y : fmaf(pair[1], factor, bias.y);
      }
    }
  }
};

// kRows q rows by a group's 64 keys, transposed, in the layout of backward_scores.cuh.
template <typename Shape>
struct BackwardBias {
  using T = typename Shape::T;
  using Scores = float[Shape::kRows / 2];
  BiasRing<Shape::kBiasStages, Shape::kBiasChunkBytes> ring;

  __device__ __forceinline__ BackwardBias(uint32_t shared, int group)
      : ring{shared + Shape::kBias + group * Shape::kBiasStages * Shape::kBiasChunkBytes,
             shared + Shape::kBiasFull + group * Shape::kBiasStages * 8,
             shared + Shape::kBiasEmpty + group * Shape::kBiasStages * 8,
             {}} {}

  // As in ForwardBias.
  __device__ __forceinline__ void Add(Scores& scores, float factor, DType dtype) {
    if (dtype == DType::kFloat32) {
      constexpr int kRows = Shape::template kBiasRows<float>;
#pragma unroll
      for (int row = 0; row < Shape::kRows; row += kRows) {
        AddFloats<kRows>(scores + row / 2, factor, ring.Await());
        ring.Leave();
      }
    } else {
      constexpr int kRows = Shape::template kBiasRows<T>;
#pragma unroll
      for (int row = 0; row < Shape::kRows; row += kRows) {
        AddPairs<kRows>(scores + row / 2, factor, ring.Await());
        ring.Leave();
      }
    }
  }

 private:
  static __device__ __forceinline__ int Warp() { return threadIdx.x / 32 % 4; }

  // Adds two blocks of eight q rows at a time: matrices of the warp's keys 0 and 8, of both.
  template <int kRows>
  static __device__ __forceinline__ void AddPairs(float* scores, float factor, uint32_t chunk) {
    const int lane = threadIdx.x & 31;
    const uint32_t rows =
        chunk + (lane / 16 * 8 + lane % 8) * 128 + ((Warp() * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
    uint32_t least = 0;
#pragma unroll
    for (int m = 0; m < kRows / 16; ++m) {
      uint32_t words[4];
      LoadMatrices<true>(rows + m * 16 * 128, words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // block 2 m + j / 2, key half j % 2
        const float2 bias = Unpack<T>(words[j]);
        float* const pair = scores + (2 * m + j / 2) * 4 + j % 2 * 2;
        pair[0] = fmaf(pair[0], factor, bias.x);
        pair[1] = fmaf(pair[1], factor, bias.y);
        least = LesserPairs<T>(least, words[j]);
      }
    }
    if (!__any_sync(0xffffffff, HasNegativeInfinity<T>(least))) return;
#pragma unroll
    for (int m = 0; m < kRows / 16; ++m) {
      uint32_t words[4];
      LoadMatrices<true>(rows + m * 16 * 128, words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 bias = Unpack<T>(words[j]);
        float* const pair = scores + (2 * m + j / 2) * 4 + j % 2 * 2;
        if (bias.x == NegativeInfinity()) pair[0] = bias.x;
        if (bias.y == NegativeInfinity()) pair[1] = bias.y;
      }
    }
  }

  // Panels of 32 keys, one after another: two warps read the first, two the second.
  template <int kRows>
  static __device__ __forceinline__ void AddFloats(float* scores, float factor, uint32_t chunk) {
    const int lane = threadIdx.x & 31;
    const int row = lane % 4 * 2, key = lane / 4;
    const uint32_t first = chunk + Warp() / 2 * (kRows * 128) + row * 128 +
                           ((Warp() % 2 * 4 + key / 4) ^ row) * 16 + key % 4 * 4;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // key half e / 2: two chunks further; row e % 2
        const float bias =
            LoadFloat((first ^ (e / 2 * 32) ^ (e % 2 * 16)) + e % 2 * 128 + n * 8 * 128);
        float& x = scores[n * 4 + e];
        x = bias == NegativeInfinity() ? bias : fmaf(x, factor, bias);
      }
    }
  }
};

template <typename Shape, template <typename> class Bias>
struct BiasOrNot {
  using Type = Bias<Shape>;
};
template <typename Shape, template <typename> class Bias>
requires(!Shape::kBiased) struct BiasOrNot<Shape, Bias> {
  using Type = NoBias<Shape>;
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BIAS_CUH_

// The operand-specific part of a forward in e4m3 (see forward_consumer.cuh):
//  - Scores are products of rounded q and k. The powers of two by which these were divided multiply
//    the softmax's scale; v's power multiplies the finished rows.
//  - p is relative to the row's largest score so far times 2^8, which uses e4m3's whole range.
//    Scores up to 2^0.75 above that score still fit and do not move it (5% faster).
//  - Tensor cores add e4m3 products with 13 fraction bits. Sums over more than one key tile are
//    therefore fp32 in ordinary code: each tile's product begins at 0 and is added to the output by
//    one multiply-add that also rescales it. (Scores, sums of at most 128 columns, are not split.)
//
// A tile's product P(j - 1) V(j - 1) is relative to the offsets after softmax(j - 1), and the
// output to the offsets before it. They differ by the factor of softmax(j - 1).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_PRODUCTS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_PRODUCTS_CUH_

#include "worker/kernels/cuda/sm90/float8/float8_forward_params.h"
#include "worker/kernels/cuda/sm90/float8/float8_wgmma.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"

namespace ringattn::worker::cuda::sm90 {

inline constexpr float kFloat8Offset = 8.0f;     // log2
inline constexpr float kFloat8Headroom = 0.75f;  // log2; 448 is 2^0.8 beyond the offset

template <typename Shape>
struct Float8ForwardProducts {
  using Params = Float8ForwardParams;
  static constexpr int kDim = Shape::kDim;
  static constexpr int kKeys = Shape::kKeys;
  static_assert(kKeys == 128 && Shape::kPanels == 1);
  using Output = float[kDim / 2];
  using Scores = float[kKeys / 2];
  using Probabilities = uint32_t[kKeys / 8];
  static constexpr bool kPackEarly = true;
  static constexpr uint32_t kUnusedBits = 0x80;  // one of the four values is enough
  static constexpr bool kScaled = true;

  static __device__ __forceinline__ const ForwardKernelParams& KernelParams(const Params& params) {
    return params.forward;
  }
  static __device__ __forceinline__ uint32_t ValuesDescriptor(uint32_t address) {
    return RowDescriptor(address);
  }

  static __device__ __forceinline__ void IssueScores(Scores& scores, uint32_t q, uint32_t k) {
    ProductFence();
#pragma unroll
    for (int step = 0; step < kDim / 32; ++step) {
      MultiplyFloat8Shared(scores, q + DescriptorBytes(step * 32), k + DescriptorBytes(step * 32),
                           step > 0);
    }
    CommitProducts();
  }

  // Issues product = P V.
  static __device__ __forceinline__ void IssueValues(Output& product, const Probabilities& p,
                                                     uint32_t v) {
    ProductFence();
#pragma unroll
    for (int step = 0; step < kKeys / 32; ++step) {
      MultiplyFloat8Registers(product, p + step * 4, v + DescriptorBytes(step * 32), step > 0);
    }
    CommitProducts();
  }

  struct Scales {
    int product_exponent = 0;  // of q times k
    int values_exponent = 0;
    float multiplier = 0.0f;
    static constexpr float kHeadroom = kFloat8Headroom;

    __device__ __forceinline__ Scales(const Params&, bool) {}
    __device__ __forceinline__ void Begin(const Params& params, bool transform, int first_head,
                                          int batch) {
      const CommonParams& common = params.forward.forward.common;
      const int per_kind = common.batch * common.num_kv_heads;
      const uint32_t* const largest =
          params.largest + batch * common.num_kv_heads + first_head / common.group_size;
      product_exponent = Float8Exponent(largest[0]) + Float8Exponent(largest[per_kind]);
      values_exponent = Float8Exponent(largest[2 * per_kind]);
      multiplier = transform ? 1.0f : ldexpf(common.scale_log2, product_exponent);
    }
    __device__ __forceinline__ void Transform(Scores& scores, const CommonParams& common) const {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores[i] = ldexpf(scores[i], product_exponent);
      TransformScores(scores, common);
    }
    __device__ __forceinline__ void Probabilities(Scores& scores, RowStates& rows) const {
      Exponentials(scores, multiplier, rows, kFloat8Offset);
    }
    __device__ __forceinline__ void Finish(Output& output, RowStates& rows) const {
      const float values = PowerOfTwo(values_exponent);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) output[i] *= values;
      rows.OffsetsToBases(multiplier);
      rows.offset[0] -= kFloat8Offset;
      rows.offset[1] -= kFloat8Offset;
    }
  };

  static __device__ __forceinline__ void Pack(const Scores& scores, uint32_t (&p)[kKeys / 8]) {
    PackFloat8Probabilities(scores, p);
  }

  struct Sums {
    Output output;
    Output product;  // of one tile

    __device__ __forceinline__ void Reset() {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) output[i] = 0.0f;
    }
    __device__ __forceinline__ Output& target() { return product; }
    __device__ __forceinline__ void Add(const float (&before)[2], const float (&)[2], bool) {
      AddLast(before);
    }
    __device__ __forceinline__ void AddLast(const float (&before)[2]) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) output[i] = fmaf(output[i], before[i / 2 % 2], product[i]);
    }
  };
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_PRODUCTS_CUH_

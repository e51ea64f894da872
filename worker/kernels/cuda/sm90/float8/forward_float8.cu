// Head dims up to 64 and up to 128 in e4m3: 128 x 128 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/sm90/float8/float8_forward_products.cuh"
#include "worker/kernels/cuda/sm90/float8/float8_forward_shape.cuh"
#include "worker/kernels/cuda/sm90/float8/float8_kernels.h"
#include "worker/kernels/cuda/sm90/forward/forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
namespace {

template <typename Shape>
__device__ __forceinline__ void RunFloat8Forward(const Float8ForwardParams& params, char* memory) {
  const uint32_t shared = SharedAddress(memory);
  InitForwardBarriers<Shape>(params.forward, shared);
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    GiveRegisters<Shape::kProducerRegisters>();
    if (__shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0) == 0) {
      ForwardProducer<Shape>::Run(params.forward, memory, shared);
    }
  } else {
    TakeRegisters<Shape::kConsumerRegisters>();
    ForwardConsumer<Shape, Float8ForwardProducts<Shape>>::Run(params, memory, shared,
                                                              warpgroup - 1);
  }
}

}  // namespace

#define RINGATTN_SM90_FLOAT8_FORWARD(dim)                                                          \
  __global__ void __launch_bounds__(384, 1)                                                        \
      sm90_fp8_bf16_attention_forward_d##dim(const __grid_constant__ Float8ForwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                               \
    RunFloat8Forward<Float8ForwardShape<__nv_bfloat16, dim>>(params, shared);                      \
  }                                                                                                \
  __global__ void __launch_bounds__(384, 1)                                                        \
      sm90_fp8_fp16_attention_forward_d##dim(const __grid_constant__ Float8ForwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                               \
    RunFloat8Forward<Float8ForwardShape<__half, dim>>(params, shared);                             \
  }                                                                                                \
  ForwardKernel Float8ForwardKernel_d##dim() {                                                     \
    using Half = Float8ForwardShape<__half, dim>;                                                  \
    static_assert(Half::kThreads == 384);                                                          \
    return {reinterpret_cast<const void*>(&sm90_fp8_bf16_attention_forward_d##dim),                \
            reinterpret_cast<const void*>(&sm90_fp8_fp16_attention_forward_d##dim),                \
            Half::kRows,                                                                           \
            Half::kKeys,                                                                           \
            Half::kPanels,                                                                         \
            Half::kThreads,                                                                        \
            Half::kSharedBytes};                                                                   \
  }

RINGATTN_SM90_FLOAT8_FORWARD(64)
RINGATTN_SM90_FLOAT8_FORWARD(128)

}  // namespace ringattn::worker::cuda::sm90

// Head dims up to 128 in e4m3: 128 x 128 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/sm90/float8_forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/float8_forward_shape.cuh"
#include "worker/kernels/cuda/sm90/float8_kernels.h"
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
namespace {

using Consumers = Float8ForwardShape<__half>;

template <typename T>
__device__ __forceinline__ void RunFloat8Forward(const Float8ForwardParams& params, char* memory) {
  using Shape = Float8ForwardShape<T>;
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
    Float8ForwardConsumer<Shape>::Run(params, memory, shared, warpgroup - 1);
  }
}

}  // namespace

__global__ void __launch_bounds__(Consumers::kThreads, 1)
    sm90_fp8_bf16_attention_forward_d128(const __grid_constant__ Float8ForwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  RunFloat8Forward<__nv_bfloat16>(params, shared);
}

__global__ void __launch_bounds__(Consumers::kThreads, 1)
    sm90_fp8_fp16_attention_forward_d128(const __grid_constant__ Float8ForwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  RunFloat8Forward<__half>(params, shared);
}

ForwardKernel Float8ForwardKernel_d128() {
  return {reinterpret_cast<const void*>(&sm90_fp8_bf16_attention_forward_d128),
          reinterpret_cast<const void*>(&sm90_fp8_fp16_attention_forward_d128),
          Consumers::kRows,
          Consumers::kKeys,
          Consumers::kPanels,
          Consumers::kThreads,
          Consumers::kSharedBytes};
}

}  // namespace ringattn::worker::cuda::sm90

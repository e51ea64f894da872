// The fp32 kernels by head-dim class (64, 128, 256), and the 16-bit fallbacks,
// which have one class only. Tiles: 32 x 32, and 16 x 16 for the backward of
// head_dim 256, whose four fp32 tiles of 32 rows would not fit every device.
#include "worker/kernels/cuda/simt_attention.cuh"
#include "worker/kernels/cuda/simt_kernels.h"

namespace ringattn::worker::cuda {

#define RINGATTN_SIMT_FORWARD(name, type, dim, tile)                                         \
  __global__ void __launch_bounds__(256)                                                     \
      simt_##name##_attention_forward_d##dim(const __grid_constant__ ForwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                         \
    SimtForward<type, dim, tile>::Run(params, shared);                                       \
  }
#define RINGATTN_SIMT_BACKWARD(name, type, dim, tile)                                          \
  __global__ void __launch_bounds__(256)                                                       \
      simt_##name##_attention_backward_d##dim(const __grid_constant__ BackwardParams params) { \
    extern __shared__ __align__(1024) char shared[];                                           \
    SimtBackward<type, dim, tile>::Run(params, shared);                                        \
  }

RINGATTN_SIMT_FORWARD(fp32, float, 64, 32)
RINGATTN_SIMT_FORWARD(fp32, float, 128, 32)
RINGATTN_SIMT_FORWARD(fp32, float, 256, 32)
RINGATTN_SIMT_FORWARD(bf16, __nv_bfloat16, 256, 32)
RINGATTN_SIMT_FORWARD(fp16, __half, 256, 32)
RINGATTN_SIMT_BACKWARD(fp32, float, 64, 32)
RINGATTN_SIMT_BACKWARD(fp32, float, 128, 32)
RINGATTN_SIMT_BACKWARD(fp32, float, 256, 16)
RINGATTN_SIMT_BACKWARD(bf16, __nv_bfloat16, 256, 16)
RINGATTN_SIMT_BACKWARD(fp16, __half, 256, 16)

namespace {
template <typename Kernel>
const void* Address(Kernel kernel) {
  return reinterpret_cast<const void*>(kernel);
}
}  // namespace

TileKernel SimtForwardKernel(int head_dim_class) {
  TileKernel kernel{nullptr, nullptr, nullptr, 32, 32, 256, 0};
  switch (head_dim_class) {
    case 64:
      kernel.fp32 = Address(&simt_fp32_attention_forward_d64);
      kernel.shared_bytes = SimtForward<float, 64, 32>::kSharedBytes;
      return kernel;
    case 128:
      kernel.fp32 = Address(&simt_fp32_attention_forward_d128);
      kernel.shared_bytes = SimtForward<float, 128, 32>::kSharedBytes;
      return kernel;
    default:
      kernel.fp32 = Address(&simt_fp32_attention_forward_d256);
      kernel.bf16 = Address(&simt_bf16_attention_forward_d256);
      kernel.fp16 = Address(&simt_fp16_attention_forward_d256);
      kernel.shared_bytes = SimtForward<float, 256, 32>::kSharedBytes;
      return kernel;
  }
}

TileKernel SimtBackwardKernel(int head_dim_class) {
  TileKernel kernel{nullptr, nullptr, nullptr, 32, 32, 256, 0};
  switch (head_dim_class) {
    case 64:
      kernel.fp32 = Address(&simt_fp32_attention_backward_d64);
      kernel.shared_bytes = SimtBackward<float, 64, 32>::kSharedBytes;
      return kernel;
    case 128:
      kernel.fp32 = Address(&simt_fp32_attention_backward_d128);
      kernel.shared_bytes = SimtBackward<float, 128, 32>::kSharedBytes;
      return kernel;
    default:
      kernel.tile_rows = 16;
      kernel.tile_keys = 16;
      kernel.fp32 = Address(&simt_fp32_attention_backward_d256);
      kernel.bf16 = Address(&simt_bf16_attention_backward_d256);
      kernel.fp16 = Address(&simt_fp16_attention_backward_d256);
      kernel.shared_bytes = SimtBackward<float, 256, 16>::kSharedBytes;
      return kernel;
  }
}

}  // namespace ringattn::worker::cuda

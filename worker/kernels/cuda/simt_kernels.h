// The kernels that need no tensor cores: fp32 for head-dim classes 64, 128 and
// 256, and bf16 and fp16 for class 256 alone (simt_attention.cuh).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_KERNELS_H_

#include "worker/kernels/cuda/attention_params.h"

namespace ringattn::worker::cuda {

TileKernel SimtForwardKernel(int head_dim_class);
TileKernel SimtBackwardKernel(int head_dim_class);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_KERNELS_H_

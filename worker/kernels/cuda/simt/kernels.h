// The kernels without tensor cores: fp32 for head-dim classes 64, 128 and 256, and bf16 and fp16
// only for class 256 (attention.cuh).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_KERNELS_H_

#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda::simt {

TileKernel ForwardKernel(int head_dim_class);
TileKernel BackwardKernel(int head_dim_class);

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_KERNELS_H_

// The kernels without tensor cores by head-dim class (attention.cuh, head_dim_classes.h): fp32 for
// all classes, and bf16 and fp16 from class 256. The widest class has no backward here
// (terms_kernels.h).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_KERNELS_H_

#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda::simt {

TileKernel ForwardKernel(int head_dim_class);
TileKernel BackwardKernel(int head_dim_class);

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_KERNELS_H_

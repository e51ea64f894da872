// The tensor-core kernels by head-dim class: max(head_dim, head_dim_v) rounded up to 32, 64, 96,
// 128, 192 or 256. bf16 and fp16.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_KERNELS_H_

#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda::sm80 {

TileKernel ForwardKernel_d32();
TileKernel ForwardKernel_d64();
TileKernel ForwardKernel_d96();
TileKernel ForwardKernel_d128();
TileKernel ForwardKernel_d192();
TileKernel ForwardKernel_d256();

TileKernel BackwardKernel_d32();
TileKernel BackwardKernel_d64();
TileKernel BackwardKernel_d96();
TileKernel BackwardKernel_d128();
TileKernel BackwardKernel_d192();
TileKernel BackwardKernel_d256();

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_KERNELS_H_

// The tensor-core kernels by head-dim class: max(head_dim, head_dim_v) rounded
// up to 32, 64, 96, 128, 192 or 256.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_KERNELS_H_

#include "worker/kernels/cuda/attention_params.h"

namespace ringattn::worker::cuda {

TileKernel Sm80ForwardKernel_d32();
TileKernel Sm80ForwardKernel_d64();
TileKernel Sm80ForwardKernel_d96();
TileKernel Sm80ForwardKernel_d128();
TileKernel Sm80ForwardKernel_d192();
TileKernel Sm80ForwardKernel_d256();

TileKernel Sm80BackwardKernel_d32();
TileKernel Sm80BackwardKernel_d64();
TileKernel Sm80BackwardKernel_d96();
TileKernel Sm80BackwardKernel_d128();
TileKernel Sm80BackwardKernel_d192();
TileKernel Sm80BackwardKernel_d256();

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_KERNELS_H_

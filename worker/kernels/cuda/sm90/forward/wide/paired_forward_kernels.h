// The sm_90a forward kernels of heads wider than 256, by the head_dim of q and k. head_dim_v is at
// most 512. Each item is computed by two thread blocks.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_KERNELS_H_

#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

ForwardKernel ForwardKernel_d512();
ForwardKernel ForwardKernel_d576();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_KERNELS_H_

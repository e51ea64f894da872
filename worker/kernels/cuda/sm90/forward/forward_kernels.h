// The sm_90a forward kernels by head-dim class: max(head_dim, head_dim_v) rounded up. The kernels
// of split keys are launched with SplitForwardParams.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_KERNELS_H_

#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

ForwardKernel ForwardKernel_d64();
ForwardKernel ForwardKernel_d96();
ForwardKernel ForwardKernel_d128();
ForwardKernel ForwardKernel_d128_long();
ForwardKernel ForwardKernel_d128_split();
ForwardKernel ForwardKernel_d192();
ForwardKernel ForwardKernel_d256();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_KERNELS_H_

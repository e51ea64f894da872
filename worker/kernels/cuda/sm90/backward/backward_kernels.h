// The sm_90a backward kernels by head-dim class: max(head_dim, head_dim_v) rounded up.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_KERNELS_H_

#include "worker/kernels/cuda/sm90/backward/backward_params.h"

namespace ringattn::worker::cuda::sm90 {

BackwardKernel BackwardKernel_d64();
BackwardKernel BackwardKernel_d96();
BackwardKernel BackwardKernel_d128();
BackwardKernel BackwardKernel_d192();
BackwardKernel BackwardKernel_d256();

// With a softcap.
BackwardKernel BackwardKernel_capped_d64();
BackwardKernel BackwardKernel_capped_d96();
BackwardKernel BackwardKernel_capped_d128();
BackwardKernel BackwardKernel_capped_d192();
BackwardKernel BackwardKernel_capped_d256();

// Kernels with a fixed order of sums (ordered_backward.h), launched with
// OrderedBackwardKernelParams.
BackwardKernel BackwardKernel_ordered_d64();
BackwardKernel BackwardKernel_ordered_d96();
BackwardKernel BackwardKernel_ordered_d128();
BackwardKernel BackwardKernel_ordered_d192();
BackwardKernel BackwardKernel_ordered_d256();

// The same with a softcap.
BackwardKernel BackwardKernel_ordered_capped_d64();
BackwardKernel BackwardKernel_ordered_capped_d96();
BackwardKernel BackwardKernel_ordered_capped_d128();
BackwardKernel BackwardKernel_ordered_capped_d192();
BackwardKernel BackwardKernel_ordered_capped_d256();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_KERNELS_H_

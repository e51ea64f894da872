// The sm_90a backward kernels of heads wider than 256, up to head_dim and head_dim_v 512. The two
// thread blocks of a cluster have the same keys, so BackwardKernel::tile_keys() does not apply: an
// item has block_keys keys.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_KERNELS_H_

#include "worker/kernels/cuda/sm90/backward/backward_params.h"

namespace ringattn::worker::cuda::sm90 {

BackwardKernel BackwardKernel_d512();
BackwardKernel BackwardKernel_capped_d512();  // with a softcap

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_KERNELS_H_

// head_dim and head_dim_v up to 512 with a softcap: tiles of 64 q rows by 64 keys, by two blocks.
#include "worker/kernels/cuda/sm90/backward/columns/column_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_COLUMN_BACKWARD(capped_d512, true)
}  // namespace ringattn::worker::cuda::sm90

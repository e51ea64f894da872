// head_dim and head_dim_v up to 512: stages of 128 columns.
#include "worker/kernels/cuda/sm90/forward/wide/paired_forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_PAIRED_FORWARD(d512, 512, 2)
}  // namespace ringattn::worker::cuda::sm90

// head_dim up to 576 and head_dim_v up to 512 (absorbed MLA): stages of K of 192 columns.
#include "worker/kernels/cuda/sm90/forward/wide/paired_forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_PAIRED_FORWARD(d576, 576, 3)
}  // namespace ringattn::worker::cuda::sm90

// head_dim up to 128 with every score term and the gradient of the bias, in a fixed order of sums.
#include "worker/kernels/cuda/sm90/ordered_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_ORDERED_TERM_BACKWARD(ordered_stores_d128, 128, 64, true, true, true)
}  // namespace ringattn::worker::cuda::sm90

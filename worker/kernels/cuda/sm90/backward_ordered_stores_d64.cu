// head_dim up to 64 with every score term and the gradient of the bias, in a fixed order of sums.
#include "worker/kernels/cuda/sm90/ordered_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_ORDERED_TERM_BACKWARD(ordered_stores_d64, 64, 128, true, true, true)
}  // namespace ringattn::worker::cuda::sm90

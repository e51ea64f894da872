// head_dim up to 64 with every score term and the gradient of the bias.
#include "worker/kernels/cuda/sm90/terms_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_TERM_BACKWARD(stores_d64, 64, 64, true, true, true)
}  // namespace ringattn::worker::cuda::sm90

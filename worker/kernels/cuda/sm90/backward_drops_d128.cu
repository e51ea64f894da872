// head_dim up to 128 with dropout, but no bias.
#include "worker/kernels/cuda/sm90/terms_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_TERM_BACKWARD(drops_d128, 128, 64, false, true)
}  // namespace ringattn::worker::cuda::sm90

// head_dim up to 64 with a bias, but no dropout.
#include "worker/kernels/cuda/sm90/terms_forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_TERM_FORWARD(biased_d64, 64, true, false)
}  // namespace ringattn::worker::cuda::sm90

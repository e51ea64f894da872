// head_dim up to 128 with every score term.
#include "worker/kernels/cuda/sm90/terms_forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_TERM_FORWARD(terms_d128, 384, 128, 128, true, true)
}  // namespace ringattn::worker::cuda::sm90

// head_dim up to 64 with every score term.
#include "worker/kernels/cuda/sm90/terms_forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_TERM_FORWARD(terms_d64, 384, 64, 128, true, true)
}  // namespace ringattn::worker::cuda::sm90

// head_dim up to 64 with ALiBi, segment ids or a mask.
#include "worker/kernels/cuda/sm90/terms_forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_TERM_FORWARD(pairs_d64, 384, 64, 128, false, false)
}  // namespace ringattn::worker::cuda::sm90

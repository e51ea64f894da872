// head_dim up to 128 with ALiBi, and segment ids or a mask beside it.
#include "worker/kernels/cuda/sm90/terms_forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_TERM_FORWARD(alibi_d128, 384, 128, 128, false, false, true)
}  // namespace ringattn::worker::cuda::sm90

// head_dim up to 64, 192 rows, with ALiBi, and segment ids or a mask beside it.
#include "worker/kernels/cuda/sm90/terms_forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_TERM_FORWARD(alibi_d64, 512, 64, 192, false, false, true)
}  // namespace ringattn::worker::cuda::sm90

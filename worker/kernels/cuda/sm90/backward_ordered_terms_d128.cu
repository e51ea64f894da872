// head_dim up to 128 with score terms, in a fixed order of sums: ALiBi, segment ids and a mask, and
// every term.
#include "worker/kernels/cuda/sm90/ordered_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_ORDERED_TERM_BACKWARD(ordered_pairs_d128, 128, 64, false, false)
RINGATTN_SM90_ORDERED_TERM_BACKWARD(ordered_terms_d128, 128, 64, true, true)
}  // namespace ringattn::worker::cuda::sm90

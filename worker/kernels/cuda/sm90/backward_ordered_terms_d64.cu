// head_dim up to 64 with score terms, in a fixed order of sums: ALiBi, segment ids and a mask, and
// every term.
#include "worker/kernels/cuda/sm90/ordered_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_ORDERED_TERM_BACKWARD(ordered_pairs_d64, 64, 128, false, false)
RINGATTN_SM90_ORDERED_TERM_BACKWARD(ordered_terms_d64, 64, 128, true, true)
}  // namespace ringattn::worker::cuda::sm90

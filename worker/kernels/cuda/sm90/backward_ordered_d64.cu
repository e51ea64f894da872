// head_dim up to 64 in a fixed order of sums, without and with a softcap: tiles of 128 q rows by
// 128 keys.
#include "worker/kernels/cuda/sm90/ordered_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_ORDERED_BACKWARD(ordered_d64, 64, 128, false)
RINGATTN_SM90_ORDERED_BACKWARD(ordered_capped_d64, 64, 128, true)
}  // namespace ringattn::worker::cuda::sm90

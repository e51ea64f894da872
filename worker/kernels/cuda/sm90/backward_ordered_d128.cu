// head_dim up to 128 in a fixed order of sums, without and with a softcap: tiles of 64 q rows by
// 128 keys.
#include "worker/kernels/cuda/sm90/ordered_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_ORDERED_BACKWARD(ordered_d128, 128, 64, false)
RINGATTN_SM90_ORDERED_BACKWARD(ordered_capped_d128, 128, 64, true)
}  // namespace ringattn::worker::cuda::sm90

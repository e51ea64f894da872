// head_dim up to 192 in a fixed order of sums, without and with a softcap: tiles of 64 q rows by
// 64 keys.
#include "worker/kernels/cuda/sm90/ordered_backward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_ORDERED_WIDE_BACKWARD(ordered_d192, 192, false)
RINGATTN_SM90_ORDERED_WIDE_BACKWARD(ordered_capped_d192, 192, true)
}  // namespace ringattn::worker::cuda::sm90

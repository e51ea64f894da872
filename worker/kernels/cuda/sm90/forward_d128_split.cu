// head_dim up to 128, at most 64 q rows, split keys: three stages of 128 keys.
#include "worker/kernels/cuda/sm90/split_forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_SPLIT_FORWARD(d128_split, 128, 128, 3)
}  // namespace ringattn::worker::cuda::sm90

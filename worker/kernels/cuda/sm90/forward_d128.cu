// head_dim up to 128: 128 x 128 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

#ifndef SHAPE
#define SHAPE 384, 128, 128, 128, true
#endif
namespace ringattn::cuda::sm90 {
RINGATTN_SM90_FORWARD(d128, SHAPE)
}  // namespace ringattn::cuda::sm90

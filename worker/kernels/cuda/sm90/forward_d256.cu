// head_dim up to 256: 128 x 80 tiles, two consumer warpgroups.
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

#ifndef SHAPE
#define SHAPE 384, 256, 128, 80, true
#endif
namespace ringattn::cuda::sm90 {
RINGATTN_SM90_FORWARD(d256, SHAPE)
}  // namespace ringattn::cuda::sm90

// head_dim up to 64: 192 x 128 tiles, three consumer warpgroups.
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

#ifndef SHAPE
#define SHAPE 512, 64, 192, 128, true
#endif
namespace ringattn::cuda::sm90 {
RINGATTN_SM90_FORWARD(d64, SHAPE)
}  // namespace ringattn::cuda::sm90

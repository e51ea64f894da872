// head_dim up to 96: 192 x 112 tiles, three consumer warpgroups.
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

#ifndef SHAPE
#define SHAPE 512, 96, 192, 112, true
#endif
namespace ringattn::cuda::sm90 {
RINGATTN_SM90_FORWARD(d96, SHAPE)
}  // namespace ringattn::cuda::sm90

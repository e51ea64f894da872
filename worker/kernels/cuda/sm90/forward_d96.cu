// head_dim up to 96: 192 x 112 tiles, three consumer warpgroups. (128 keys: the probabilities
// do not fit beside the scores, and ptxas serialises the products.)
#include "worker/kernels/cuda/sm90/forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
RINGATTN_SM90_FORWARD(d96, 512, 96, 192, 112, true)
}  // namespace ringattn::worker::cuda::sm90

// Softmax weights of chosen rows (ProbabilitiesCall): the kernels.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PROBABILITIES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PROBABILITIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "worker/kernels/cuda/plan/probability_params.h"

namespace ringattn::worker::cuda {

// What no key has been seen for: -inf wherever a score may come to stand. Enqueues, as do the
// others; the launch's error. REQUIRES: params.row_count * num_heads * columns > 0.
cudaError_t LaunchUnseen(const ProbabilityParams& params, cudaStream_t stream);

// Stores the score, or the weight where params.finished, of every pair of the tiles whose key the
// row sees; nothing else is written. `tile_pairs`: the plan's. REQUIRES: tile_count > 0.
cudaError_t LaunchProbabilityTiles(const ProbabilityParams& params, int32_t tile_pairs,
                                   int64_t tile_count, cudaStream_t stream);

// Scores become weights, and 0 where there is none.
cudaError_t LaunchWeights(const ProbabilityParams& params, cudaStream_t stream);

// All kernels that these launch.
std::vector<const void*> ProbabilityKernels();

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PROBABILITIES_H_

// Kernels for softmax weights of chosen rows (ProbabilitiesCall).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PROBABILITIES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PROBABILITIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "worker/kernels/cuda/plan/probability_params.h"

namespace ringattn::worker::cuda {

// Sets the whole target to -inf, the value of pairs without a score. Enqueues the kernel, as the
// functions below do, and returns the launch's error. REQUIRES: params.row_count * num_heads *
// columns > 0.
cudaError_t LaunchUnseen(const ProbabilityParams& params, cudaStream_t stream);

// Stores the score, or the weight if params.finished, of every pair of the tiles whose key the row
// sees; writes nothing else. `tile_pairs`: from the plan. REQUIRES: tile_count > 0.
cudaError_t LaunchProbabilityTiles(const ProbabilityParams& params, int32_t tile_pairs,
                                   int64_t tile_count, cudaStream_t stream);

// Converts scores to weights, and sets pairs without a score to 0.
cudaError_t LaunchWeights(const ProbabilityParams& params, cudaStream_t stream);

// All kernels that the functions above launch.
std::vector<const void*> ProbabilityKernels();

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PROBABILITIES_H_

// Launches that precede an attention kernel with segment ids or a mask. They fill PairTables
// (terms_params.h) from the plan's tiles, ids and mask. Each launch reads only its tables and
// writes all of its results.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_CLASSES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_CLASSES_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// For the parameters of a forward or a backward; the grids are some blocks per tile, and `batch` or
// the mask's planes. Asynchronous. Does nothing if the call has no ids or no mask.
cudaError_t LaunchPairClasses(const TermForwardKernelParams& params, int32_t tile_keys,
                              cudaStream_t stream);
cudaError_t LaunchPairClasses(const TermBackwardKernelParams& params, int32_t tile_rows,
                              cudaStream_t stream);

// The most key tiles that are sorted. More tiles are many waves of blocks, of which the last is a
// small part.
inline constexpr int32_t kMostSortedTiles = 2048;

// Sorts the backward's tiles by their number of visible pairs, the largest first, into `sorted`.
// Call it once the classes are computed: the plan's order does not consider segments. REQUIRES: the
// call has segment ids, and at most kMostSortedTiles tiles.
cudaError_t LaunchSortedTiles(const TermBackwardKernelParams& params, int32_t tile_rows,
                              BackwardTile* sorted, cudaStream_t stream);

// Computes turns.pair_turns of an ordered backward, once the classes are computed. Does nothing if
// it is null.
cudaError_t LaunchPairTurns(const OrderedTermBackwardKernelParams& params, cudaStream_t stream);

// All kernels of these launches; they use no dynamic shared memory.
std::vector<const void*> PairClassEntries();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_CLASSES_H_

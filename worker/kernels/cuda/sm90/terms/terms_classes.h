// Launches ahead of an attention kernel with segment ids or a mask: they fill PairTables
// (terms_params.h) from the plan's tiles, ids and mask. Each reads its own tables alone and writes
// all of what it is for.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_CLASSES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_CLASSES_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// Of a forward's params, or a backward's; grids are some blocks to a tile, and `batch` or the
// mask's planes. Asynchronous; nothing happens where the call has no ids, or no mask.
cudaError_t LaunchPairClasses(const TermForwardKernelParams& params, int32_t tile_keys,
                              cudaStream_t stream);
cudaError_t LaunchPairClasses(const TermBackwardKernelParams& params, int32_t tile_rows,
                              cudaStream_t stream);

// Most key tiles that are sorted: more are many waves of blocks, whose end is a small part.
inline constexpr int32_t kMostSortedTiles = 2048;

// `sorted` becomes the backward's tiles by what they compute, the most first, once the classes are
// there: the plan's order knows nothing of segments. REQUIRES: the call has segment ids, and at
// most kMostSortedTiles.
cudaError_t LaunchSortedTiles(const TermBackwardKernelParams& params, int32_t tile_rows,
                              BackwardTile* sorted, cudaStream_t stream);

// Of an ordered backward: turns.pair_turns, once the classes are there. Nothing happens where that
// is null.
cudaError_t LaunchPairTurns(const OrderedTermBackwardKernelParams& params, cudaStream_t stream);

// All of these kernels; they take no dynamic shared memory.
std::vector<const void*> PairClassEntries();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_CLASSES_H_

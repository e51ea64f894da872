// Chooses how many query heads of a group an item of the Hopper backward processes, one after
// another. Pure. `slots` items run at a time. A slot is a multiprocessor, or a pair of them for
// clusters of two thread blocks. "Blocks" below are items.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BACKWARD_DEAL_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BACKWARD_DEAL_H_

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/tile_plan.h"
#include "worker/kernels/cuda/sm90/backward/backward_params.h"

namespace ringattn::worker::cuda::sm90 {

// The work of a backward's blocks, as input of the model that predicts when they end.
struct BackwardWork {
  std::vector<int32_t> query_tiles;  // per key tile in the plan's order: the query tiles that see
                                     // it
  int64_t num_heads = 0;             // query heads
  int32_t group_size = 1;
  int64_t batch = 1;
  int64_t tile_operations = 0;  // floating-point, of one thread block for one head's pair of tiles
  int64_t tile_sums = 0;        // elements of a key tile's dk and dv
  int64_t sums = 0;             // elements of the dk and dv of all keys
  int64_t head_bytes = 0;       // q, dout and dq's sums of one head in one batch row
};

// `item_keys`: the keys of an item. `block_dim`: the head dim that a thread block computes with,
// which may differ from the call's.
BackwardWork WorkOf(const BackwardCall& call, const BackwardPlan& plan,
                    const BackwardKernel& kernel, int32_t item_keys, int64_t block_dim);

// Returns how many packs of heads share a section (backward_params.h): enough for about one wave of
// blocks. Then the longest blocks of the last section start early, and blocks of one pack still
// find the same q, dout and dq in the cache. (H200, 2026-11-22, TFLOP/s with one pack, one wave,
// all packs: causal at 4K tokens 467, 589, 582; full mask at 16K 591, 591, 421.)
int32_t SectionPacks(int64_t tiles, int64_t packs, int slots);

// Returns the microseconds from the start of the first block to the end of the last one, if each
// idle slot takes the next block. `stores`: blocks store dk and dv instead of adding to sums.
double BlocksTime(const BackwardWork& work, int32_t heads_per_block, bool stores, int slots);

// Returns the number of heads per block with which the blocks finish first: `usual`, or more if the
// gain is clear and a section's q, dout and dq do not exceed the cache by much. Blocks of unequal
// length do not process the same head at the same time. (H200, 2026-11-24, causal at 4K tokens,
// d128, TFLOP/s with the usual heads per block and with twice as many. Sections of 67 MB with 32/8
// heads: 527 and 561. Sections of 134 MB with 64/8 heads: 555 and 497; with the full mask, where
// blocks stay in step, 624 and 639.) `can_store`: blocks with all heads of a group store dk and dv.
// Other blocks add to sums that must be zeroed first and converted afterwards.
int32_t BestHeads(const BackwardWork& work, int32_t usual, bool can_store, int slots);

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BACKWARD_DEAL_H_

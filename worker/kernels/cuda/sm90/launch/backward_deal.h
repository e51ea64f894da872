// How many query heads of a group an item of the Hopper backward takes, one after the other. Pure.
// Items are computed in `slots` at a time: multiprocessors, or pairs where a cluster of two thread
// blocks has one ("blocks" below).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BACKWARD_DEAL_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BACKWARD_DEAL_H_

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/tile_plan.h"
#include "worker/kernels/cuda/sm90/backward/backward_params.h"

namespace ringattn::worker::cuda::sm90 {

// What a backward's blocks have to do, as far as it says when they end.
struct BackwardWork {
  std::vector<int32_t> query_tiles;  // that see each key tile, in the plan's order
  int64_t num_heads = 0;             // query heads
  int32_t group_size = 1;
  int64_t batch = 1;
  int64_t tile_operations = 0;  // floating-point, of a head's pair of tiles, by one thread block
  int64_t tile_sums = 0;        // elements of a key tile's dk and dv
  int64_t sums = 0;             // of all keys'
  int64_t head_bytes = 0;       // of a head's q, dout and dq's sums, in one batch row
};

// `kernel_dim`: the head dim that `kernel` computes with, whatever the call's is.
BackwardWork WorkOf(const BackwardCall& call, const BackwardPlan& plan,
                    const BackwardKernel& kernel, int64_t kernel_dim);

// How many packs of heads share a section (backward_params.h): as many as make about one wave of
// blocks, so that the longest of the last section start early, and blocks of one pack still meet
// the same q, dout and dq in the cache. (H200, 2026-11-22, TFLOP/s with one pack, a wave, all
// packs: causal at 4K tokens 467, 589, 582; the full mask at 16K 591, 591, 421.)
int32_t SectionPacks(int64_t tiles, int64_t packs, int slots);

// Microseconds from the first block's start to the last one's end, if slots that have nothing to
// do take the next block. `stores`: blocks store dk and dv, rather than add to sums.
double BlocksTime(const BackwardWork& work, int32_t heads_per_block, bool stores, int slots);

// With how many heads of a group blocks are done first: `usual`, or more where that is clearly
// earlier and a section's q, dout and dq are not much more than the cache holds: blocks of unequal
// length do not go through their heads in step. (H200, 2026-11-24, causal at 4K tokens, d128, heads
// of a section's 67 and 134 MB: 32/8 527 and, twice as many a block, 561 TFLOP/s; 64/8 555 and 497;
// under the full mask, in step, 624 and 639.) `can_store`: blocks with all of them store dk and dv,
// and the others add, to sums that must be zeroed before and converted behind.
int32_t BestHeads(const BackwardWork& work, int32_t usual, bool can_store, int slots);

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BACKWARD_DEAL_H_

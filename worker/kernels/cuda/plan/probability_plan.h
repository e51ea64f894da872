// The tables of a ProbabilitiesCall's kernels. They order the chosen rows so that neighbours share
// reads of k, and list the keys that each group of rows meets. Pure host arithmetic.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_PROBABILITY_PLAN_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_PROBABILITY_PLAN_H_

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/probability_params.h"

namespace ringattn::worker::cuda {

// Pairs of a tile: one kernel serves many pairs, another a few.
inline constexpr int32_t kProbabilityPairs = 64;
inline constexpr int32_t kFewProbabilityPairs = 8;
inline constexpr int32_t kProbabilityKeys = 64;  // that a tile computes at a time

struct ProbabilityPlan {
  std::vector<ChosenRowLocation> rows;  // all chosen rows of the call, by batch row, document and
                                        // position
  std::vector<ProbabilityTile> tiles;
  int32_t tile_pairs = kProbabilityPairs;
};

// Plans about `target_tiles` tiles if there are enough keys. Rows without a document see no key and
// are in no tile.
ProbabilityPlan PlanProbabilities(const ProbabilitiesCall& call, int64_t target_tiles);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_PROBABILITY_PLAN_H_

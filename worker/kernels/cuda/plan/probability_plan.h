// The tables of a ProbabilitiesCall's kernels: chosen rows in an order that lets neighbours share
// their reads of k, and which of them meet which keys. Pure host arithmetic.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_PROBABILITY_PLAN_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_PROBABILITY_PLAN_H_

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/probability_params.h"

namespace ringattn::worker::cuda {

// Pairs of a tile: a kernel for many and one for few.
inline constexpr int32_t kProbabilityPairs = 64;
inline constexpr int32_t kFewProbabilityPairs = 8;
inline constexpr int32_t kProbabilityKeys = 64;  // that a tile computes at a time

struct ProbabilityPlan {
  std::vector<ChosenRowLocation> rows;  // all of the call's, by batch row, document and position
  std::vector<ProbabilityTile> tiles;
  int32_t tile_pairs = kProbabilityPairs;
};

// `target_tiles`: about so many tiles should exist, where there are that many keys.
// Rows of no document see nothing and are in no tile.
ProbabilityPlan PlanProbabilities(const ProbabilitiesCall& call, int64_t target_tiles);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_PROBABILITY_PLAN_H_

// Parameters of the kernels for probabilities of chosen rows, in addition to attention_params.h and
// term_params.h. probability_plan.h fills the tables. No CUDA headers.
//
// A *pair* here is a chosen row and one of a key head's query heads: pair p is row p / group_size
// of the table of rows and head p % group_size of the group.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_PROBABILITY_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_PROBABILITY_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/plan/term_params.h"

namespace ringattn::worker::cuda {

// A chosen row. It sees key position j iff lower <= j - position <= upper.
struct ChosenRowLocation {
  int64_t batch = 0;
  int64_t local_row = 0;  // in the call's queries
  int64_t position = 0;   // in its document
  int64_t lower = 0;
  int64_t upper = -1;
  int64_t shift = 0;       // as in TermRange
  int32_t document = 0;    // as in TermRange
  int32_t target_row = 0;  // its number in ProbabilitiesCall::rows
};

// Pairs [pair_begin, pair_begin + pair_count), all of one batch row and document, against keys
// [row_begin, row_begin + row_count) of one block. Key c of these has position k_position +
// k_stride c.
struct ProbabilityTile {
  const void* k = nullptr;               // device: [batch, block_rows, num_kv_heads, head_dim]
  const int32_t* segment_ids = nullptr;  // device: [batch, block_rows]; null: the problem has none
  int64_t block_rows = 0;
  int64_t row_begin = 0;
  int64_t k_position = 0;
  int64_t k_stride = 1;
  int32_t row_count = 0;
  int32_t pair_begin = 0;
  int32_t pair_count = 0;
  int32_t unused = 0;
};

struct ProbabilityParams {
  CommonParams common;                      // vector_qk covers q and every block's k
  TermParams terms;                         // without ranges
  const ProbabilityTile* tiles = nullptr;   // device; [grid.x]
  const ChosenRowLocation* rows = nullptr;  // device
  const void* q = nullptr;
  float* target = nullptr;     // [row_count, num_heads, columns]
  const float* lse = nullptr;  // [batch, num_heads, q_rows]
  int64_t columns = 0;
  int32_t row_count = 0;
  int32_t finished = 0;  // tiles store weights instead of scores
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_PROBABILITY_PARAMS_H_

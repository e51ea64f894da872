// The end of a forward row: divide, merge with the previous partial, store.
#ifndef RINGATTN_WORKER_KERNELS_CPU_FINISH_ROW_H_
#define RINGATTN_WORKER_KERNELS_CPU_FINISH_ROW_H_

#include <cstdint>
#include <optional>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/simd/tile_ops.h"
#include "worker/kernels/cpu/workspace/token_runs.h"

namespace ringattn::worker::cpu {

// The online softmax's state of a row after the last key; max and sum as in SoftmaxArgs.
struct RowSums {
  const float* out = nullptr;  // [head_dim_v], not yet divided by sum
  float max = 0.0f;
  float sum = 0.0f;  // 0: no key was seen, and out is not read
  // Set for a row from WideRows: out is normalised, sum is 1 and max is not read.
  std::optional<float> lse = std::nullopt;
};

// Writes one row of the call's out or out_acc, and its lse.
//   temporary [head_dim_v]
void FinishRow(const ForwardCall& call, const ScoreScale& scale, int64_t batch_index, int64_t head,
               int64_t local_row, const RowSums& sums, float* temporary);

// Rows that no piece names see no key, but still have an output.
//   q: the runs of call.q_pieces
void FinishRowsOutsidePieces(const ForwardCall& call, const TokenRuns& q);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_FINISH_ROW_H_

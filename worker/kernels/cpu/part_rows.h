// Between a tensor and those that have some of its rows and heads (GatherCall, ScatterCall).
#ifndef RINGATTN_WORKER_KERNELS_CPU_PART_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CPU_PART_ROWS_H_

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker::cpu {

// Rows [begin, end) of the part's outer * part_rows rows, with all their heads. Disjoint ranges may
// run at once.
void GatherRows(const GatherCall& call, int64_t begin, int64_t end);

// The same of the whole's outer * rows rows.
void ScatterRows(const ScatterCall& call, int64_t begin, int64_t end);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_PART_ROWS_H_

// Checks of the copies, sums and merges between a whole tensor and its parts.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_PART_CONTROLS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_PART_CONTROLS_H_

namespace ringattn::worker::cuda::check {

// Compares with the definition. Copies: rows and heads of a part (two runs of 70 of 200 rows, and
// 3,000 runs of one row each of 6,000; four heads of seven, one of them twice), in both orders of
// the axes, of 2 to 48 bytes. Sums and merges: three parts, one of them without rows, with and
// without earlier values, rounded or not, into separate memory or the values' memory, with and
// without sinks, with some rows without keys.
bool PartsAreParts();

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_PART_CONTROLS_H_

// Controls of what goes between a whole tensor and its parts'.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_PART_CONTROLS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_PART_CONTROLS_H_

namespace ringattn::worker::cuda::check {

// Against the definition: rows and heads of a part, two runs of 70 of 200 rows and 3,000 runs of a
// row each of 6,000, four heads of seven with one of them twice, in both orders of the axes, of 2
// to 48 bytes; and sums and merges of three parts, one of no rows, with and without something
// before them, rounded or not, into memory of its own or the values', with and without sinks, of
// some rows without keys.
bool PartsAreParts();

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_PART_CONTROLS_H_

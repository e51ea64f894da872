// Controls of the copies between a whole tensor and a part's.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_PART_CONTROLS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_PART_CONTROLS_H_

namespace ringattn::worker::cuda::check {

// Rows and heads of a part, against the definition: two runs of 70 of 200 rows, four heads of seven
// with one of them twice, in both orders of the axes; and the merge, of some rows without keys.
bool PartsAreParts();

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_PART_CONTROLS_H_

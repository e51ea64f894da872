// Divides long launches of persistent kernels into shifts (WorkShifts in forward_params.h).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_WORK_SHIFTS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_WORK_SHIFTS_H_

#include <cstdint>

#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

struct ShiftedLaunch {
  int32_t blocks = 0;  // of the launch
  WorkShifts shifts;
};

// Returns how to launch `items`, of which `at_once` run at a time and which take about `seconds`
// together. `tuned_cycles` is KernelTuning::shift_cycles. Launches that are shorter than two shifts
// are not divided. Pure.
ShiftedLaunch DivideIntoShifts(int64_t items, int32_t at_once, double seconds,
                               int64_t tuned_cycles = 0);

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_WORK_SHIFTS_H_

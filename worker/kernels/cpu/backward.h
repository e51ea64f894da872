// The backward pass on the CPU: one sweep that recomputes the weights.
#ifndef RINGATTN_WORKER_KERNELS_CPU_BACKWARD_H_
#define RINGATTN_WORKER_KERNELS_CPU_BACKWARD_H_

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker::cpu {

// Computes `call` (host memory) on the workspace's threads. The order of every sum depends on the
// call alone, so results have the same bits for any number of threads. Returns CANCELLED once
// progress reports a stop; gradients are then undefined.
//   dbias  of a BiasGradientCall whose elements the backward has (BackwardHasBiasGradient); the
//          call computes it too; null if it is not requested
absl::Status Backward(const BackwardCall& call, void* dbias, Workspace& workspace,
                      const Progress& progress);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_BACKWARD_H_

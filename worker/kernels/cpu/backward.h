// The backward pass on the CPU: one sweep that recomputes the weights.
#ifndef RINGATTN_WORKER_KERNELS_CPU_BACKWARD_H_
#define RINGATTN_WORKER_KERNELS_CPU_BACKWARD_H_

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker::cpu {

// Computes `call` (host memory) on the workspace's threads. Every sum is made in
// an order that depends on the call alone, so results are the same bits whatever
// the number of threads. CANCELLED once progress says stopped; gradients are then
// undefined.
//   dbias  of a BiasGradientCall whose elements the backward has (BackwardHasBiasGradient), which
//          is then done as well; else null
absl::Status Backward(const BackwardCall& call, void* dbias, Workspace& workspace,
                      const Progress& progress);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_BACKWARD_H_

// The forward pass on the CPU: blocked online softmax.
#ifndef RINGATTN_WORKER_KERNELS_CPU_FORWARD_H_
#define RINGATTN_WORKER_KERNELS_CPU_FORWARD_H_

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker::cpu {

// Computes `call` (host memory) on the workspace's threads. The result does not
// depend on their number. CANCELLED once progress says stopped; outputs are then
// undefined.
absl::Status Forward(const ForwardCall& call, Workspace& workspace, const Progress& progress);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_FORWARD_H_

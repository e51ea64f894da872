// Softmax weights of chosen rows (ProbabilitiesCall).
#ifndef RINGATTN_WORKER_KERNELS_CPU_PROBABILITIES_H_
#define RINGATTN_WORKER_KERNELS_CPU_PROBABILITIES_H_

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/workspace/progress.h"
#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker::cpu {

absl::Status Probabilities(const ProbabilitiesCall& call, Workspace& workspace,
                           const Progress& progress);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_PROBABILITIES_H_

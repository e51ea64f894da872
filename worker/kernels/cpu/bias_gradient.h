// The bias's gradient on CPUs: worker/kernels/attention_kernel.h, BiasGradientCall.
#ifndef RINGATTN_WORKER_KERNELS_CPU_BIAS_GRADIENT_H_
#define RINGATTN_WORKER_KERNELS_CPU_BIAS_GRADIENT_H_

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/workspace/progress.h"
#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker::cpu {

absl::Status BiasGradient(const BiasGradientCall& call, Workspace& workspace,
                          const Progress& progress);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_BIAS_GRADIENT_H_

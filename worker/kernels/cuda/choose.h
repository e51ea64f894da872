// Which kernel serves which request: the first of the families of families.cc that can.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHOOSE_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHOOSE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/kernels/cuda/launch/family.h"

namespace ringattn::worker::cuda {

// All families, in order of preference (families.cc).
const std::vector<KernelFamily>& Families();

// INVALID_ARGUMENT, naming what there is, unless `name` is empty or a family's.
absl::Status CheckFamily(const std::string& name);

// INVALID_ARGUMENT for a problem outside attention_kernel.h's limits.
absl::Status CheckProblem(const AttentionProblem& problem);

// The family that serves a problem; some of its calls may fall to a later one. INVALID_ARGUMENT for
// a problem outside attention_kernel.h's limits, or if `tuning` names a family that does not serve
// it.
absl::StatusOr<const KernelFamily*> ChooseForward(const AttentionProblem& problem,
                                                  const DeviceInfo& device,
                                                  const KernelTuning& tuning);
absl::StatusOr<const KernelFamily*> ChooseBackward(const AttentionProblem& problem,
                                                   const DeviceInfo& device,
                                                   const KernelTuning& tuning);

// Chooses, among the families that take the call, and prepares. Errors as above, and INTERNAL with
// CUDA's text.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareForward(const ForwardCall& call,
                                                               const DeviceInfo& device,
                                                               const KernelTuning& tuning = {});
// Whether what PrepareForward makes of the call waits for late keys. False where that is an error.
bool TakesLateKeys(const ForwardCall& call, const DeviceInfo& device,
                   const KernelTuning& tuning = {});
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBackward(const BackwardCall& call,
                                                                const DeviceInfo& device,
                                                                const KernelTuning& tuning = {});
// Of the family that serves the problem's backward. INVALID_ARGUMENT also for a problem without a
// bias.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBiasGradient(
    const BiasGradientCall& call, const DeviceInfo& device, const KernelTuning& tuning = {});

// A backward call and, from the same operands, the gradient of its bias.
struct PreparedGradients {
  std::unique_ptr<PreparedKernel> backward;       // computes both
  std::unique_ptr<PreparedKernel> bias_gradient;  // has nothing left to do, under the same name
};
// Both by one kernel; empty where there is none for them, or their operands differ: each then is
// prepared by itself. Errors as PrepareBackward's.
absl::StatusOr<PreparedGradients> PrepareGradients(const BackwardCall& call,
                                                   const BiasGradientCall& gradient,
                                                   const DeviceInfo& device,
                                                   const KernelTuning& tuning = {});

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHOOSE_H_

// Chooses the kernel of a call: the first family of families.cc that can compute it.
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

// Returns INVALID_ARGUMENT, listing the families, unless `name` is empty or names a family.
absl::Status CheckFamily(const std::string& name);

// Returns INVALID_ARGUMENT for a problem outside attention_kernel.h's limits.
absl::Status CheckProblem(const AttentionProblem& problem);

// Returns the family that serves a problem. A later family may compute those of its calls that this
// one does not take. Returns INVALID_ARGUMENT for a problem outside attention_kernel.h's limits, or
// if `tuning` names a family that does not serve it.
absl::StatusOr<const KernelFamily*> ChooseForward(const AttentionProblem& problem,
                                                  const DeviceInfo& device,
                                                  const KernelTuning& tuning);
absl::StatusOr<const KernelFamily*> ChooseBackward(const AttentionProblem& problem,
                                                   const DeviceInfo& device,
                                                   const KernelTuning& tuning);

// Chooses among the families that take the call, and prepares it. Returns the errors above, or
// INTERNAL with CUDA's text.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareForward(const ForwardCall& call,
                                                               const DeviceInfo& device,
                                                               const KernelTuning& tuning = {});
// Returns whether the kernel that PrepareForward chooses waits for late keys; false if
// PrepareForward returns an error.
bool TakesLateKeys(const ForwardCall& call, const DeviceInfo& device,
                   const KernelTuning& tuning = {});
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBackward(const BackwardCall& call,
                                                                const DeviceInfo& device,
                                                                const KernelTuning& tuning = {});
// Prepares the gradient of a bias with the family that serves the problem's backward. Returns
// INVALID_ARGUMENT also for a problem without a bias.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBiasGradient(
    const BiasGradientCall& call, const DeviceInfo& device, const KernelTuning& tuning = {});

// A backward call and, from the same operands, the gradient of its bias.
struct PreparedGradients {
  std::unique_ptr<PreparedKernel> backward;       // computes both
  std::unique_ptr<PreparedKernel> bias_gradient;  // does nothing; its name is the backward's
};
// Prepares one kernel for both. Returns empty pointers if no kernel computes both or their operands
// differ; the caller then prepares them separately. Errors as for PrepareBackward.
absl::StatusOr<PreparedGradients> PrepareGradients(const BackwardCall& call,
                                                   const BiasGradientCall& gradient,
                                                   const DeviceInfo& device,
                                                   const KernelTuning& tuning = {});

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHOOSE_H_

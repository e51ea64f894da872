#include "worker/kernels/cuda/sm90/family.h"

#include "worker/kernels/cuda/simt/family.h"
#include "worker/kernels/cuda/sm90/launch/backward.h"
#include "worker/kernels/cuda/sm90/launch/bias_gradient.h"
#include "worker/kernels/cuda/sm90/launch/float8_forward.h"
#include "worker/kernels/cuda/sm90/launch/forward.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareForward(const ForwardCall& call,
                                                               const DeviceInfo& device,
                                                               const KernelTuning& tuning) {
  if (call.problem->compute == ComputeDType::kFloat8E4M3) {
    return PreparedFloat8Forward::Create(call, device, tuning);
  }
  return PreparedForward::Create(call, device, tuning);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBackward(const BackwardCall& call,
                                                                const DeviceInfo& device,
                                                                const KernelTuning&) {
  return PreparedBackward::Create(call, device);
}

// The exact family computes bias gradients that this family's kernel does not take.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBiasGradient(const BiasGradientCall& call,
                                                                    const DeviceInfo& device) {
  if (TakesBiasGradient(call, device)) return PreparedBiasGradient::Create(call, device);
  return simt::Family().prepare_bias_gradient(call, device);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBothGradients(
    const BackwardCall& call, const BiasGradientCall& gradient, const DeviceInfo& device) {
  if (!StoresBiasGradient(call, gradient.dbias)) return nullptr;
  return PreparedBackward::Create(call, device, gradient.dbias);
}

std::vector<KernelEntry> Entries(const DeviceInfo& device) {
  if (device.compute_major != 9) return {};
  std::vector<KernelEntry> entries = ForwardEntries();
  for (const KernelEntry& entry : Float8ForwardEntries()) entries.push_back(entry);
  for (const KernelEntry& entry : BackwardEntries()) entries.push_back(entry);
  for (const KernelEntry& entry : BiasGradientEntries()) entries.push_back(entry);
  std::erase_if(entries, [&device](const KernelEntry& entry) {
    return entry.shared_bytes > device.shared_bytes_per_block;
  });
  return entries;
}

}  // namespace

std::optional<KernelFamily> Family() {
  KernelFamily family{kName,           ServesForward, ServesBackward, PrepareForward,
                      PrepareBackward, Entries,       TakesForward,   TakesBackward};
  family.takes_late_keys = TakesLateKeys;
  family.repeats = true;
  family.terms = true;  // calls that its kernels do not take go to the exact family
  family.float8 = true;
  family.prepare_bias_gradient = PrepareBiasGradient;
  family.prepare_both_gradients = PrepareBothGradients;
  return family;
}

}  // namespace ringattn::worker::cuda::sm90

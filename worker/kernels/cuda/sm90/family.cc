#include "worker/kernels/cuda/sm90/family.h"

#include "worker/kernels/cuda/simt/family.h"
#include "worker/kernels/cuda/sm90/backward.h"
#include "worker/kernels/cuda/sm90/float8_forward.h"
#include "worker/kernels/cuda/sm90/forward.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

// Score terms go to this family only where it is forced: its kernels for them compile, and have run
// on no GPU yet. To be kAlways once cuda_kernels_test --terms --family=sm90 has passed on one, and
// kernel_speed.py --terms says that they are worth it.
constexpr TermService kTerms = TermService::kForced;

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

std::vector<KernelEntry> Entries(const DeviceInfo& device) {
  if (device.compute_major != 9) return {};
  std::vector<KernelEntry> entries = ForwardEntries();
  for (const KernelEntry& entry : Float8ForwardEntries()) entries.push_back(entry);
  for (const KernelEntry& entry : BackwardEntries()) entries.push_back(entry);
  std::erase_if(entries, [&device](const KernelEntry& entry) {
    return entry.shared_bytes > device.shared_bytes_per_block;
  });
  return entries;
}

}  // namespace

std::optional<KernelFamily> Family() {
  KernelFamily family{kName,           ServesForward, ServesBackward, PrepareForward,
                      PrepareBackward, Entries,       TakesForward,   TakesBackward};
  family.terms = kTerms;
  family.float8 = true;
  // A bias's gradient has the exact family's kernel alone.
  family.prepare_bias_gradient = simt::Family().prepare_bias_gradient;
  return family;
}

}  // namespace ringattn::worker::cuda::sm90

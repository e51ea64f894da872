#include "worker/kernels/cuda/sm90/family.h"

#include "worker/kernels/cuda/sm90/forward.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareForward(const ForwardCall& call,
                                                               const DeviceInfo& device,
                                                               const KernelTuning& tuning) {
  return PreparedForward::Create(call, device, tuning);
}

bool ServesBackward(const AttentionProblem&, const DeviceInfo&) { return false; }

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBackward(const BackwardCall&,
                                                                const DeviceInfo&,
                                                                const KernelTuning&) {
  return absl::InternalError("sm90 has no backward");
}

std::vector<KernelEntry> Entries(const DeviceInfo& device) {
  if (device.compute_major != 9) return {};
  std::vector<KernelEntry> entries = ForwardEntries();
  std::erase_if(entries, [&device](const KernelEntry& entry) {
    return entry.shared_bytes > device.shared_bytes_per_block;
  });
  return entries;
}

}  // namespace

std::optional<KernelFamily> Family() {
  return KernelFamily{kName,           ServesForward, ServesBackward, PrepareForward,
                      PrepareBackward, Entries,       TakesForward};
}

}  // namespace ringattn::worker::cuda::sm90

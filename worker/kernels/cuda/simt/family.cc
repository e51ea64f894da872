#include "worker/kernels/cuda/simt/family.h"

#include <algorithm>

#include "worker/kernels/cuda/launch.h"
#include "worker/kernels/cuda/prepare_backward.h"
#include "worker/kernels/cuda/prepare_forward.h"
#include "worker/kernels/cuda/simt/kernels.h"

namespace ringattn::worker::cuda::simt {
namespace {

constexpr std::string_view kName = "simt";
constexpr int kWidestClass = 256;
constexpr int kClasses[] = {64, 128, kWidestClass};

// The narrow classes have fp32 alone.
int ClassOf(const AttentionProblem& problem) {
  if (problem.dtype != DType::kFloat32) return kWidestClass;
  const int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  return *std::find_if(std::begin(kClasses), std::end(kClasses),
                       [dim](int each) { return dim <= each; });
}

// The largest kernel takes 75 KB of shared memory, which every such device has.
bool Serves(const AttentionProblem&, const DeviceInfo&) { return true; }

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareForward(const ForwardCall& call,
                                                               const DeviceInfo& device,
                                                               const KernelTuning& tuning) {
  return PrepareTiledForward(kName, ForwardKernel(ClassOf(*call.problem)), call, device, tuning);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBackward(const BackwardCall& call,
                                                                const DeviceInfo& device,
                                                                const KernelTuning&) {
  return PrepareTiledBackward(kName, BackwardKernel(ClassOf(*call.problem)), /*staged_dq=*/false,
                              call, device);
}

std::vector<KernelEntry> Entries(const DeviceInfo&) {
  std::vector<KernelEntry> entries;
  for (int each : kClasses) AddEntries(ForwardKernel(each), entries);
  for (int each : kClasses) AddEntries(BackwardKernel(each), entries);
  return entries;
}

}  // namespace

KernelFamily Family() { return {kName, Serves, Serves, PrepareForward, PrepareBackward, Entries}; }

}  // namespace ringattn::worker::cuda::simt

#include "worker/kernels/cuda/sm80/family.h"

#include <algorithm>
#include <optional>

#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/prepare_backward.h"
#include "worker/kernels/cuda/launch/prepare_forward.h"
#include "worker/kernels/cuda/sm80/kernels.h"

namespace ringattn::worker::cuda::sm80 {
namespace {

constexpr std::string_view kName = "sm80";

struct HeadDimClass {
  int head_dim;
  TileKernel (*forward)();
  TileKernel (*backward)();
};
constexpr HeadDimClass kClasses[] = {
    {32, ForwardKernel_d32, BackwardKernel_d32},    {64, ForwardKernel_d64, BackwardKernel_d64},
    {96, ForwardKernel_d96, BackwardKernel_d96},    {128, ForwardKernel_d128, BackwardKernel_d128},
    {192, ForwardKernel_d192, BackwardKernel_d192}, {256, ForwardKernel_d256, BackwardKernel_d256},
};

// Returns the kernel as this device runs it, or no value if the device lacks the shared memory.
std::optional<TileKernel> On(const DeviceInfo& device, TileKernel kernel) {
  if (device.compute_major >= 9 && kernel.shared_bytes_sm90 > 0) {
    kernel.shared_bytes = kernel.shared_bytes_sm90;
  }
  if (kernel.shared_bytes > device.shared_bytes_per_block) return std::nullopt;
  return kernel;
}

using Direction = TileKernel (*HeadDimClass::*)();

std::optional<TileKernel> Find(Direction direction, const AttentionProblem& problem,
                               const DeviceInfo& device) {
  if (problem.dtype == DType::kFloat32) return std::nullopt;
  const int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  for (const HeadDimClass& each : kClasses) {
    if (dim <= each.head_dim) return On(device, (each.*direction)());
  }
  return std::nullopt;
}

bool ServesForward(const AttentionProblem& problem, const DeviceInfo& device) {
  return Find(&HeadDimClass::forward, problem, device).has_value();
}

bool ServesBackward(const AttentionProblem& problem, const DeviceInfo& device) {
  return Find(&HeadDimClass::backward, problem, device).has_value();
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareForward(const ForwardCall& call,
                                                               const DeviceInfo& device,
                                                               const KernelTuning& tuning) {
  return PrepareTiledForward(kName, *Find(&HeadDimClass::forward, *call.problem, device), call,
                             device, tuning);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBackward(const BackwardCall& call,
                                                                const DeviceInfo& device,
                                                                const KernelTuning&) {
  const TileKernel kernel = *Find(&HeadDimClass::backward, *call.problem, device);
  return PrepareTiledBackward(kName, kernel, /*staged_dq=*/device.compute_major >= 9, call, device);
}

std::vector<KernelEntry> Entries(const DeviceInfo& device) {
  std::vector<KernelEntry> entries;
  for (const HeadDimClass& each : kClasses) {
    for (const TileKernel& kernel : {each.forward(), each.backward()}) {
      if (const auto usable = On(device, kernel)) AddEntries(*usable, entries);
    }
  }
  return entries;
}

}  // namespace

KernelFamily Family() {
  return {kName, ServesForward, ServesBackward, PrepareForward, PrepareBackward, Entries};
}

}  // namespace ringattn::worker::cuda::sm80

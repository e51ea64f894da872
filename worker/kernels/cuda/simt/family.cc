#include "worker/kernels/cuda/simt/family.h"

#include <algorithm>

#include "common/base/limits.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/prepare_backward.h"
#include "worker/kernels/cuda/launch/prepare_forward.h"
#include "worker/kernels/cuda/simt/head_dim_classes.h"
#include "worker/kernels/cuda/simt/kernels.h"
#include "worker/kernels/cuda/simt/terms.h"

namespace ringattn::worker::cuda::simt {
namespace {

constexpr std::string_view kName = "simt";
static_assert(kWidestClass == kMaxHeadDim);
// The narrowest class whose kernels without terms also take 16-bit tensors.
constexpr int kSixteenBitClass = 256;

int NarrowestClass(const AttentionProblem& problem) {
  const int64_t dim = std::max(problem.head_dim, problem.head_dim_v);
  return *std::find_if(std::begin(kHeadDimClasses), std::end(kHeadDimClasses),
                       [dim](int each) { return dim <= each; });
}

int ClassOf(const AttentionProblem& problem) {
  const int narrowest = NarrowestClass(problem);
  return problem.dtype == DType::kFloat32 ? narrowest : std::max(narrowest, kSixteenBitClass);
}

// The widest class has no backward without terms: the kernels with terms compute it.
bool HasPlainBackward(const AttentionProblem& problem) {
  return NarrowestClass(problem) < kWidestClass;
}

// The largest kernel needs 77 KB of shared memory, which all these devices have.
bool Serves(const AttentionProblem&, const DeviceInfo&) { return true; }

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareForward(const ForwardCall& call,
                                                               const DeviceInfo& device,
                                                               const KernelTuning& tuning) {
  const AttentionProblem& problem = *call.problem;
  if (problem.terms.any()) {
    return PrepareTermForward(kName, TermKernelsOf(NarrowestClass(problem)), call, device, tuning);
  }
  return PrepareTiledForward(kName, ForwardKernel(ClassOf(*call.problem)), call, device, tuning);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBackward(const BackwardCall& call,
                                                                const DeviceInfo& device,
                                                                const KernelTuning&) {
  const AttentionProblem& problem = *call.problem;
  if (problem.terms.any() || problem.deterministic || !HasPlainBackward(problem)) {
    return PrepareTermBackward(kName, TermKernelsOf(NarrowestClass(problem)), call);
  }
  return PrepareTiledBackward(kName, BackwardKernel(ClassOf(*call.problem)), /*staged_dq=*/false,
                              call, device);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBiasGradient(const BiasGradientCall& call,
                                                                    const DeviceInfo& device) {
  return PrepareTermBiasGradient(kName, TermKernelsOf(NarrowestClass(*call.problem)), call, device);
}

std::vector<KernelEntry> Entries(const DeviceInfo&) {
  std::vector<KernelEntry> entries;
  for (int each : kHeadDimClasses) AddEntries(ForwardKernel(each), entries);
  for (int each : kHeadDimClasses) {
    if (each < kWidestClass) AddEntries(BackwardKernel(each), entries);
  }
  for (int each : kHeadDimClasses) {
    const TermKernels kernels = TermKernelsOf(each);
    for (const TileKernel& kernel :
         {kernels.forward, kernels.key_gradient, kernels.query_gradient, kernels.bias_gradient}) {
      entries.push_back({kernel.fp32, kernel.shared_bytes});  // the same for every dtype
    }
  }
  return entries;
}

}  // namespace

KernelFamily Family() {
  KernelFamily family{kName, Serves, Serves, PrepareForward, PrepareBackward, Entries};
  family.repeats = true;
  family.terms = true;
  family.prepare_bias_gradient = PrepareBiasGradient;
  return family;
}

}  // namespace ringattn::worker::cuda::simt

#include "worker/kernels/cuda/choose.h"

#include <algorithm>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/attention/dtype.h"
#include "worker/kernels/same_operands.h"

namespace ringattn::worker::cuda {
namespace {

// CUDA's limit of a grid's second and third dimension: heads and batch rows.
constexpr int64_t kMaximalGrid = 65535;

using Serves = bool (*KernelFamily::*)(const AttentionProblem&, const DeviceInfo&);

// Returns whether the family supports the problem's score terms, fixed order of sums and compute
// dtype.
bool Considered(const KernelFamily& family, Serves serves, const AttentionProblem& problem) {
  const bool backward = serves == &KernelFamily::serves_backward;
  if (backward && problem.deterministic && !family.repeats) return false;
  if (!backward && problem.compute == ComputeDType::kFloat8E4M3 && !family.float8) return false;
  return family.terms || !problem.terms.any();
}

// Describes the property of the problem that most families do not support; null if there is none.
const char* BeyondPlain(Serves serves, const AttentionProblem& problem) {
  const bool backward = serves == &KernelFamily::serves_backward;
  const bool same_bits = backward && problem.deterministic;
  if (!backward && problem.compute == ComputeDType::kFloat8E4M3) return "with products in e4m3";
  if (problem.terms.any()) {
    return same_bits ? "with bias, mask, segment ids, ALiBi or dropout, the same bits every time"
           : problem.softcap > 0 ? "with bias, mask, segment ids, ALiBi or dropout, and a softcap"
                                 : "with bias, mask, segment ids, ALiBi or dropout";
  }
  return same_bits ? "with the same bits every time" : nullptr;
}

// `takes` decides on the call, for a family that serves the problem.
absl::StatusOr<const KernelFamily*> Choose(
    Serves serves, const char* direction, const AttentionProblem& problem, const DeviceInfo& device,
    const KernelTuning& tuning,
    absl::FunctionRef<bool(const KernelFamily&)> takes = [](const KernelFamily&) { return true; }) {
  if (absl::Status status = CheckProblem(problem); !status.ok()) return status;
  if (absl::Status status = CheckFamily(tuning.family); !status.ok()) return status;
  const char* const beyond_plain = BeyondPlain(serves, problem);
  bool untaken = false;
  for (const KernelFamily& family : Families()) {
    if (!tuning.family.empty() && family.name != tuning.family) continue;
    if (!Considered(family, serves, problem)) continue;
    if (!(family.*serves)(problem, device)) continue;
    if (takes(family)) return &family;
    untaken = true;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "no ", tuning.family.empty() ? "" : absl::StrCat(tuning.family, " "), "kernel computes a ",
      direction, " in ", DTypeName(problem.dtype), " with head_dim ", problem.head_dim, " and ",
      problem.head_dim_v, " on compute capability ", device.compute_major, ".x with ",
      device.shared_bytes_per_block, " bytes of shared memory",
      beyond_plain == nullptr ? "" : absl::StrCat(", ", beyond_plain),
      untaken ? ", from these pieces and addresses" : "",
      tuning.family.empty() ? "" : ": the kernel family was forced"));
}

// Returns the family that serves the call's problem and takes the call.
absl::StatusOr<const KernelFamily*> FamilyOf(const ForwardCall& call, const DeviceInfo& device,
                                             const KernelTuning& tuning) {
  return Choose(&KernelFamily::serves_forward, "forward", *call.problem, device, tuning,
                [&call](const KernelFamily& family) {
                  return family.takes_forward == nullptr || family.takes_forward(call);
                });
}
absl::StatusOr<const KernelFamily*> FamilyOf(const BackwardCall& call, const DeviceInfo& device,
                                             const KernelTuning& tuning) {
  return Choose(&KernelFamily::serves_backward, "backward", *call.problem, device, tuning,
                [&call](const KernelFamily& family) {
                  return family.takes_backward == nullptr || family.takes_backward(call);
                });
}

// A call without results of its own: another call's kernel computes them, or the batch is empty.
class NoOpKernel : public PreparedKernel {
 public:
  explicit NoOpKernel(const KernelName& name) : PreparedKernel(name.family, name.kernel_class) {}
  void WriteTables(void*) const override {}
  void DropTables() override {}
  absl::Status Launch(const TableLaunch&) const override { return absl::OkStatus(); }
};

std::unique_ptr<PreparedKernel> NoOp(const KernelFamily& family) {
  return std::make_unique<NoOpKernel>(KernelName{family.name, kPlainKernelClass});
}

}  // namespace

absl::Status CheckProblem(const AttentionProblem& problem) {
  for (const int64_t dim : {problem.head_dim, problem.head_dim_v}) {
    if (dim >= 1 && dim <= kMaxHeadDim) continue;
    return absl::InvalidArgumentError(absl::StrCat("head_dim ", problem.head_dim, " and ",
                                                   problem.head_dim_v, " must be in 1..",
                                                   kMaxHeadDim));
  }
  if (problem.num_heads < 1 || problem.num_kv_heads < 1 ||
      problem.num_heads % problem.num_kv_heads != 0 || problem.num_heads > kMaximalGrid) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_heads ", problem.num_heads, " must be a multiple of num_kv_heads ",
                     problem.num_kv_heads, " and at most ", kMaximalGrid));
  }
  if (problem.batch < 0 || problem.batch > kMaximalGrid) {
    return absl::InvalidArgumentError(
        absl::StrCat("batch ", problem.batch, " must be at most ", kMaximalGrid));
  }
  return absl::OkStatus();
}

absl::Status CheckFamily(const std::string& name) {
  if (name.empty()) return absl::OkStatus();
  std::vector<std::string_view> names;
  for (const KernelFamily& family : Families()) {
    if (family.name == name) return absl::OkStatus();
    names.push_back(family.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("kernel family \"", name, "\" is none of ",
                   absl::StrJoin(names, ", ", [](std::string* out, std::string_view each) {
                     absl::StrAppend(out, std::string(each));
                   })));
}

absl::StatusOr<const KernelFamily*> ChooseForward(const AttentionProblem& problem,
                                                  const DeviceInfo& device,
                                                  const KernelTuning& tuning) {
  return Choose(&KernelFamily::serves_forward, "forward", problem, device, tuning);
}

absl::StatusOr<const KernelFamily*> ChooseBackward(const AttentionProblem& problem,
                                                   const DeviceInfo& device,
                                                   const KernelTuning& tuning) {
  return Choose(&KernelFamily::serves_backward, "backward", problem, device, tuning);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareForward(const ForwardCall& call,
                                                               const DeviceInfo& device,
                                                               const KernelTuning& tuning) {
  const absl::StatusOr<const KernelFamily*> family = FamilyOf(call, device, tuning);
  if (!family.ok()) return family.status();
  if (call.problem->batch == 0) return NoOp(**family);
  return (*family)->prepare_forward(call, device, tuning);
}

bool TakesLateKeys(const ForwardCall& call, const DeviceInfo& device, const KernelTuning& tuning) {
  const absl::StatusOr<const KernelFamily*> family = FamilyOf(call, device, tuning);
  return family.ok() && (*family)->takes_late_keys != nullptr && (*family)->takes_late_keys(call);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBackward(const BackwardCall& call,
                                                                const DeviceInfo& device,
                                                                const KernelTuning& tuning) {
  absl::StatusOr<const KernelFamily*> family = FamilyOf(call, device, tuning);
  if (!family.ok()) return family.status();
  if (call.problem->batch == 0) return NoOp(**family);
  return (*family)->prepare_backward(call, device, tuning);
}

absl::StatusOr<PreparedGradients> PrepareGradients(const BackwardCall& call,
                                                   const BiasGradientCall& gradient,
                                                   const DeviceInfo& device,
                                                   const KernelTuning& tuning) {
  absl::StatusOr<const KernelFamily*> family = FamilyOf(call, device, tuning);
  if (!family.ok()) return family.status();
  PreparedGradients gradients;
  if ((*family)->prepare_both_gradients == nullptr || call.problem->batch == 0 ||
      !SameOperands(call, gradient)) {
    return gradients;
  }
  auto prepared = (*family)->prepare_both_gradients(call, gradient, device);
  if (!prepared.ok()) return prepared.status();
  if (*prepared == nullptr) return gradients;
  gradients.bias_gradient = std::make_unique<NoOpKernel>((*prepared)->name());
  gradients.backward = *std::move(prepared);
  return gradients;
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareBiasGradient(const BiasGradientCall& call,
                                                                    const DeviceInfo& device,
                                                                    const KernelTuning& tuning) {
  if (!call.problem->terms.bias.has_value()) {
    return absl::InvalidArgumentError("the problem has no bias, so it has no bias gradient");
  }
  absl::StatusOr<const KernelFamily*> family = ChooseBackward(*call.problem, device, tuning);
  if (!family.ok()) return family.status();
  if (call.problem->batch == 0) return NoOp(**family);  // a ZeroCall has cleared the gradient
  return (*family)->prepare_bias_gradient(call, device);
}

}  // namespace ringattn::worker::cuda

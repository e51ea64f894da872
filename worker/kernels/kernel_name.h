// The name of the kernel that serves a call, for timelines, metrics and reports.
#ifndef RINGATTN_WORKER_KERNELS_KERNEL_NAME_H_
#define RINGATTN_WORKER_KERNELS_KERNEL_NAME_H_

#include <string_view>

namespace ringattn::worker {

// Views of static strings. All empty for calls that do not multiply q by k (sums, copies).
struct KernelName {
  std::string_view family;        // "sm90", "cpu_bf16": as in ServedCalls (device.h)
  std::string_view kernel_class;  // one of the constants below
  std::string_view instructions;  // CPUs: the instruction set, "AVX3"; else empty

  bool empty() const { return family.empty(); }
  bool operator==(const KernelName&) const = default;
};

inline constexpr std::string_view kPlainKernelClass = "plain";
// Kernels that compute score terms. On GPUs the exact ones are also deterministic.
inline constexpr std::string_view kTermKernelClass = "terms";
// Kernels that multiply in e4m3 (ComputeDType::kFloat8E4M3).
inline constexpr std::string_view kFloat8KernelClass = "fp8";

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_KERNEL_NAME_H_

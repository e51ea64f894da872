// Which kernel serves a call, for timelines, metrics and reports.
#ifndef RINGATTN_WORKER_KERNELS_KERNEL_NAME_H_
#define RINGATTN_WORKER_KERNELS_KERNEL_NAME_H_

#include <string_view>

namespace ringattn::worker {

// Text of static storage. All empty for calls that do not multiply q by k (sums, copies).
struct KernelName {
  std::string_view family;        // "sm90", "cpu_bf16": as ServedCalls (device.h) has it
  std::string_view kernel_class;  // of the family's: one of those below
  std::string_view instructions;  // of CPUs: the instruction set, "AVX3"; else empty

  bool empty() const { return family.empty(); }
  bool operator==(const KernelName&) const = default;
};

inline constexpr std::string_view kPlainKernelClass = "plain";
// That compute score terms; the exact ones on GPUs also the same bits every time.
inline constexpr std::string_view kTermKernelClass = "terms";
// That multiply e4m3 (ComputeDType::kFloat8E4M3).
inline constexpr std::string_view kFloat8KernelClass = "fp8";

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_KERNEL_NAME_H_

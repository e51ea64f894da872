// A family: attention kernels for one kind of hardware that are chosen, prepared and launched
// together. families.cc lists them in order of preference and is the only place that knows all.
//
// To add a family, create a folder with its kernels and one KernelFamily, and add a line to
// families.cc. prepare_forward.h and prepare_backward.h prepare kernels that walk the tables of
// tile_plan.h with the parameters of attention_params.h. Other kernels implement a PreparedKernel.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_FAMILY_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_FAMILY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/launch/device_info.h"
#include "worker/kernels/cuda/launch/prepared_kernel.h"

namespace ringattn::worker::cuda {

// Choices that a caller may force, for tests and debugging.
struct KernelTuning {
  std::string family;          // empty: the first family that serves the call
  int32_t max_key_splits = 0;  // forward: 1 = never split the keys; 0 = chosen here
  // sm90 forward: keys per q tile from which the kernel for long ranges serves the call; 0 = chosen
  // by sm90
  int64_t long_keys = 0;
  // sm90 forward: cycles after which a block of a long launch gives way to other streams; 0 =
  // chosen by sm90, -1 = never
  int64_t shift_cycles = 0;
};

// A __global__ function, and the dynamic shared memory that it is launched with.
struct KernelEntry {
  const void* address = nullptr;
  int32_t shared_bytes = 0;
};

// A plain value; functions are pure but for Prepare's use of the driver (tensor maps).
struct KernelFamily {
  std::string_view name;

  // Whether a kernel of the family can compute this problem on this device. Called for problems
  // with score terms only if the family has `terms`, and for a deterministic backward only if the
  // family `repeats`.
  bool (*serves_forward)(const AttentionProblem& problem, const DeviceInfo& device);
  bool (*serves_backward)(const AttentionProblem& problem, const DeviceInfo& device);

  // REQUIRES: the family serves the call's problem and takes the call. The call's problem and
  // pointers are copied; the call need not outlive the result.
  absl::StatusOr<std::unique_ptr<PreparedKernel>> (*prepare_forward)(const ForwardCall& call,
                                                                     const DeviceInfo& device,
                                                                     const KernelTuning& tuning);
  absl::StatusOr<std::unique_ptr<PreparedKernel>> (*prepare_backward)(const BackwardCall& call,
                                                                      const DeviceInfo& device,
                                                                      const KernelTuning& tuning);

  // Every kernel that this device may run.
  std::vector<KernelEntry> (*entries)(const DeviceInfo& device);

  // Whether the family can compute this call of a problem that it serves, given the call's pieces
  // and addresses. Null: it takes all calls.
  bool (*takes_forward)(const ForwardCall& call) = nullptr;
  bool (*takes_backward)(const BackwardCall& call) = nullptr;

  // Whether the kernel for this call of a problem that the family serves waits for late keys. Null:
  // no kernel does.
  bool (*takes_late_keys)(const ForwardCall& call) = nullptr;

  // Whether equal backward calls of a deterministic problem give equal bits. If false, sums depend
  // on the order in which blocks end. Every family's forward repeats its bits.
  bool repeats = false;

  // Whether the family computes forwards in e4m3.
  bool float8 = false;

  bool terms = false;
  // Prepares the gradient of a bias. REQUIRES: the problem has a bias. Not null in families with
  // terms.
  absl::StatusOr<std::unique_ptr<PreparedKernel>> (*prepare_bias_gradient)(
      const BiasGradientCall& call, const DeviceInfo& device) = nullptr;
  // Prepares one kernel that computes a backward call, which the family serves and takes, and the
  // gradient of its bias from the same operands. Returns a null pointer if this needs two kernels.
  // Null: it always needs two.
  absl::StatusOr<std::unique_ptr<PreparedKernel>> (*prepare_both_gradients)(
      const BackwardCall& call, const BiasGradientCall& gradient,
      const DeviceInfo& device) = nullptr;
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_FAMILY_H_

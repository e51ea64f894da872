// A family: attention kernels for one kind of hardware that are chosen, prepared and launched
// together. families.cc lists them in order of preference and is the only place that knows all.
//
// A new one is a folder with its kernels and one KernelFamily, and a line in families.cc. Kernels
// that walk the tables of tile_plan.h with the parameters of attention_params.h are prepared by
// prepare_forward.h and prepare_backward.h; others bring a PreparedKernel of their own.
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

// What a caller may force, for tests and debugging.
struct KernelTuning {
  std::string family;          // empty: the first that serves the call
  int32_t max_key_splits = 0;  // forward: 1 = never split the keys; 0 = chosen here
  // sm90's forward: keys per q tile from which the kernel for long ranges serves; 0 = chosen there
  int64_t long_keys = 0;
};

// A __global__ function, and the dynamic shared memory that it is launched with.
struct KernelEntry {
  const void* address = nullptr;
  int32_t shared_bytes = 0;
};

// A plain value; functions are pure but for Prepare's use of the driver (tensor maps).
struct KernelFamily {
  std::string_view name;

  // Whether a kernel of the family can compute this problem on this device. Asked of problems with
  // score terms as `terms` says, and of a deterministic backward where the family `repeats`.
  bool (*serves_forward)(const AttentionProblem& problem, const DeviceInfo& device);
  bool (*serves_backward)(const AttentionProblem& problem, const DeviceInfo& device);

  // REQUIRES: the family serves the call's problem, and takes the call. The call's problem and
  // pointers are copied; the call itself need not outlive the result.
  absl::StatusOr<std::unique_ptr<PreparedKernel>> (*prepare_forward)(const ForwardCall& call,
                                                                     const DeviceInfo& device,
                                                                     const KernelTuning& tuning);
  absl::StatusOr<std::unique_ptr<PreparedKernel>> (*prepare_backward)(const BackwardCall& call,
                                                                      const DeviceInfo& device,
                                                                      const KernelTuning& tuning);

  // Every kernel that this device may be asked to run.
  std::vector<KernelEntry> (*entries)(const DeviceInfo& device);

  // Whether it can compute this call of a problem that it serves: pieces and addresses. Null: all.
  bool (*takes_forward)(const ForwardCall& call) = nullptr;
  bool (*takes_backward)(const BackwardCall& call) = nullptr;

  // Whether the kernel of this call, of a problem that it serves, waits for late keys. Null: none.
  bool (*takes_late_keys)(const ForwardCall& call) = nullptr;

  // Whether equal backward calls of a deterministic problem give equal bits; else sums may add up
  // in whatever order blocks end in. (Every forward's do.)
  bool repeats = false;

  // Whether it is asked of forwards in e4m3.
  bool float8 = false;

  bool terms = false;
  // Of a problem with a bias; not null in families with terms.
  absl::StatusOr<std::unique_ptr<PreparedKernel>> (*prepare_bias_gradient)(
      const BiasGradientCall& call, const DeviceInfo& device) = nullptr;
  // A backward call that it serves and takes, and the gradient of its bias from the same operands,
  // by one kernel; a null pointer where that is two kernels' work. Null: it always is.
  absl::StatusOr<std::unique_ptr<PreparedKernel>> (*prepare_both_gradients)(
      const BackwardCall& call, const BiasGradientCall& gradient,
      const DeviceInfo& device) = nullptr;
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_FAMILY_H_

// The CUDA back end of worker/kernels/attention_kernel.h. A caller queries a device and loads its
// kernels once. It prepares forward and backward calls (choose.h: family, configuration, tables)
// and launches each any number of times (prepared_kernel.h). Small calls start without preparation.
//
//   const DeviceInfo device = *QueryDevice(0);
//   LoadKernels(device);
//   auto forward = *PrepareForward(call, device);
//   forward->WriteTables(host);   // copied to the device by the caller
//   forward->Launch({stream, tables, scratch, stop_word});   // asynchronous
//
// Launches never allocate device or pinned memory and never wait. Tables, scratch and operands are
// in use until the enqueued work has run. `stream` must belong to the current device. Tensors are
// memory of that device. Base pointers are aligned to 16 bytes, or lie a whole number of rows after
// such an address. Accumulators (out_acc, dq_acc, dk, dv) are fp32.
//
// Sums across thread blocks (dq_acc, and dk and dv if the heads of a group are distributed over
// blocks) use fp32 reductions in memory. Their order may differ from run to run, and so may the
// last bits. The forward is deterministic. The backward is deterministic if the problem requests
// it: either blocks add in a fixed order (sm90/ordered_backward.h), or one block computes each sum
// (simt).
//
// Errors: INVALID_ARGUMENT for a problem outside attention_kernel.h's limits; INTERNAL with CUDA's
// text if a launch fails. Thread-safe: no shared state.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CUDA_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/choose.h"
#include "worker/kernels/cuda/launch/device_info.h"
#include "worker/kernels/cuda/launch/prepared_kernel.h"

namespace ringattn::worker::cuda {

absl::StatusOr<DeviceInfo> QueryDevice(int device);

// Loads every kernel onto the current device and raises its shared-memory limit. Takes some
// seconds. Call it before the first launch: otherwise CUDA loads a kernel at its first launch, and
// may then wait for device work that itself waits for that launch.
absl::Status LoadKernels(const DeviceInfo& device);

// Prepare copies between a whole tensor and the tensors of its shards. They compute no attention,
// so their family has no name. The calls' lists are read until WriteTables has returned.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareGather(const GatherCall& call);
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareScatter(const ScatterCall& call);

// Prepares the softmax weights of chosen rows. One kernel serves every problem, independent of the
// family that computes its attention. Its arithmetic and its name are those of "simt".
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareProbabilities(const ProbabilitiesCall& call,
                                                                     const DeviceInfo& device);

// Prepares a call that zeroes `call`'s target, a bias's gradient, except the elements that the
// later calls `behind` store in the same gradient. Returns null if StartZero must zero the whole
// target: where PartlyStoredOf returns no value, or if all planes together have more than 2^31 - 1
// rows.
std::unique_ptr<PreparedKernel> PrepareZero(const ZeroCall& call,
                                            const std::vector<const BiasGradientCall*>& behind);

// These calls need no preparation.
absl::Status StartDelta(const DeltaCall& call, cudaStream_t stream);
absl::Status StartSinkGradient(const SinkGradientCall& call, cudaStream_t stream);
absl::Status StartZero(const ZeroCall& call, cudaStream_t stream);
absl::Status StartAdd(const AddCall& call, cudaStream_t stream);
absl::Status StartConvert(const ConvertCall& call, cudaStream_t stream);
absl::Status StartMerge(const MergeCall& call, cudaStream_t stream);
absl::Status StartCopy(const CopyCall& call, cudaStream_t stream);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CUDA_KERNELS_H_

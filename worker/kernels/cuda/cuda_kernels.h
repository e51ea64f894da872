// The CUDA back end of worker/kernels/attention_kernel.h, as its users see it: a device is asked
// once and its kernels loaded; forward and backward calls are prepared (choose.h: path check,
// configuration, tables) and launched any number of times (prepared_kernel.h); the small calls
// start as they are.
//
//   const DeviceInfo device = *QueryDevice(0);
//   LoadKernels(device);
//   auto forward = *PrepareForward(call, device);
//   forward->WriteTables(host);   // copied to the device by the caller
//   forward->Launch({stream, tables, scratch, stop_word});   // asynchronous
//
// Launches never allocate device or pinned memory and never wait. Tables, scratch and operands
// are in use until the work enqueued has run. The current device must be the one that `stream`
// belongs to. Tensors are memory of that device; base pointers are aligned to 16 bytes, or lie a
// whole number of rows behind such an address. Accumulators (out_acc, dq_acc, dk, dv) are fp32.
//
// Sums across thread blocks (dq_acc, and dk and dv when the heads of a group are
// spread over blocks) use fp32 reductions in memory: their order, hence the last
// bits, may differ from run to run. The forward is deterministic, and so is the backward of
// problems that say so: blocks take turns (sm90/ordered_backward.h), or every sum is left to one
// block (simt).
//
// Errors: INVALID_ARGUMENT for a problem outside attention_kernel.h's limits, INTERNAL with
// CUDA's text when a launch fails. Thread-safe: there is no shared state.
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

// Loads every kernel onto the current device, and allows each its shared memory there: some
// seconds. Before anything is launched. CUDA would load a kernel at its first launch, and may
// wait then for work of the device that waits for that launch.
absl::Status LoadKernels(const DeviceInfo& device);

// Between a whole tensor and its parts'. Their family has no name, as they compute no attention.
// The calls' lists are read until WriteTables has returned, and not after it.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareGather(const GatherCall& call);
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareScatter(const ScatterCall& call);

// Softmax weights of chosen rows. One kernel serves every problem, whatever family computes its
// attention, by the arithmetic of "simt", whose name it has.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareProbabilities(const ProbabilitiesCall& call,
                                                                     const DeviceInfo& device);

// A call that zeroes what it must of a bias's gradient, `call`'s target, whose address the calls
// `behind` have: not what they store themselves. Null where all is to be zeroed, by StartZero: as
// PartlyStoredOf, and of more than 2^31 - 1 rows in all planes.
std::unique_ptr<PreparedKernel> PrepareZero(const ZeroCall& call,
                                            const std::vector<const BiasGradientCall*>& behind);

// The calls that need no preparation.
absl::Status StartDelta(const DeltaCall& call, cudaStream_t stream);
absl::Status StartSinkGradient(const SinkGradientCall& call, cudaStream_t stream);
absl::Status StartZero(const ZeroCall& call, cudaStream_t stream);
absl::Status StartAdd(const AddCall& call, cudaStream_t stream);
absl::Status StartConvert(const ConvertCall& call, cudaStream_t stream);
absl::Status StartMerge(const MergeCall& call, cudaStream_t stream);
absl::Status StartCopy(const CopyCall& call, cudaStream_t stream);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CUDA_KERNELS_H_

// Small kernels: delta, gradients of sinks, sums, conversions, copies, merging of partials and
// combination of the partials of split keys. Each function enqueues on `stream` and returns the
// launch's error. They never allocate and never wait.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_ELEMENTWISE_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_ELEMENTWISE_H_

#include <cuda_runtime_api.h>

#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda {

// Also sets dq_acc to 0, in the same kernel if the layout permits.
cudaError_t LaunchDelta(const DeltaCall& call, cudaStream_t stream);
cudaError_t LaunchSinkGradient(const SinkGradientCall& call, cudaStream_t stream);
cudaError_t LaunchAdd(const AddCall& call, cudaStream_t stream);
cudaError_t LaunchConvert(const ConvertCall& call, cudaStream_t stream);
cudaError_t LaunchMerge(const MergeCall& call, cudaStream_t stream);
cudaError_t LaunchCopy(const CopyCall& call, cudaStream_t stream);

// Merges the partials of `tile_count` q tiles in a fixed order, then merges the previous partial,
// and writes the outputs of params.forward. `early`: as in SplitKeys::Combine.
cudaError_t LaunchCombine(DType dtype, const CombineParams& params, int64_t tile_count,
                          cudaStream_t stream, bool early);

// All kernels that the functions above launch.
std::vector<const void*> ElementwiseKernels();

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_ELEMENTWISE_H_

// The driver's encoder of tensor maps.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TENSOR_MAP_ENCODER_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TENSOR_MAP_ENCODER_H_

#include <cuda.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::worker::cuda {

// cuTensorMapEncodeTiled, which the static runtime does not link: asked for once. INTERNAL, with
// CUDA's text, if the driver has none. Thread safe.
absl::StatusOr<decltype(&cuTensorMapEncodeTiled)> TensorMapEncoder();

// INTERNAL with CUDA's number, and the name of what was to be encoded.
absl::Status EncodingStatus(CUresult result, const char* name);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TENSOR_MAP_ENCODER_H_

// The driver's encoder of tensor maps.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TENSOR_MAP_ENCODER_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TENSOR_MAP_ENCODER_H_

#include <cuda.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::worker::cuda {

// Returns the driver's cuTensorMapEncodeTiled, which the static runtime does not link. Looks it up
// once. Returns INTERNAL with CUDA's text if the driver does not provide it. Thread safe.
absl::StatusOr<decltype(&cuTensorMapEncodeTiled)> TensorMapEncoder();

// Returns INTERNAL with CUDA's number and the name of the encoded object.
absl::Status EncodingStatus(CUresult result, const char* name);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TENSOR_MAP_ENCODER_H_

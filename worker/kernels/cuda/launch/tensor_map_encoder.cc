#include "worker/kernels/cuda/launch/tensor_map_encoder.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch/launch.h"

namespace ringattn::worker::cuda {
namespace {

using Encoder = decltype(&cuTensorMapEncodeTiled);

absl::StatusOr<Encoder> Find() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  absl::Status status = ToStatus(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                  12000, cudaEnableDefault, &found),
                                 "cuTensorMapEncodeTiled");
  if (!status.ok()) return status;
  if (found != cudaDriverEntryPointSuccess) {
    return absl::InternalError("the driver does not provide cuTensorMapEncodeTiled; update it");
  }
  return reinterpret_cast<Encoder>(entry);
}

}  // namespace

absl::StatusOr<Encoder> TensorMapEncoder() {
  static const absl::StatusOr<Encoder> encoder = Find();
  return encoder;
}

absl::Status EncodingStatus(CUresult result, const char* name) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("tensor map of ", name, ": CUDA error ", result));
}

}  // namespace ringattn::worker::cuda

#include "worker/kernels/cuda/tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/launch.h"

namespace ringattn::worker::cuda {

absl::Status EncodeTensorMap(const char* name, void* base, const MappedTensor& tensor,
                             const MapBox& box, unsigned char (&map)[128]) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  absl::Status status = ToStatus(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                  12000, cudaEnableDefault, &found),
                                 "cuTensorMapEncodeTiled");
  if (!status.ok()) return status;
  if (found != cudaDriverEntryPointSuccess) {
    return absl::InternalError("the driver has no cuTensorMapEncodeTiled");
  }
  const cuuint64_t row_bytes = cuuint64_t{4} * tensor.head_dim;
  const cuuint64_t sizes[4] = {
      static_cast<cuuint64_t>(tensor.head_dim), static_cast<cuuint64_t>(tensor.heads),
      static_cast<cuuint64_t>(tensor.rows), static_cast<cuuint64_t>(tensor.batch)};
  const cuuint64_t strides[3] = {row_bytes, row_bytes * sizes[1], row_bytes * sizes[1] * sizes[2]};
  const cuuint32_t boxes[4] = {static_cast<cuuint32_t>(box.columns), 1,
                               static_cast<cuuint32_t>(box.rows), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap encoded;
  static_assert(sizeof(encoded) == sizeof(map));
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      &encoded, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, base, sizes, strides, boxes, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return absl::InternalError(absl::StrCat("tensor map of ", name, ": CUDA error ", result));
  }
  std::memcpy(map, &encoded, sizeof(map));
  return absl::OkStatus();
}

}  // namespace ringattn::worker::cuda

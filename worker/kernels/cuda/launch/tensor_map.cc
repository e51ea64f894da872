#include "worker/kernels/cuda/launch/tensor_map.h"

#include <cstring>

#include "worker/kernels/cuda/launch/tensor_map_encoder.h"

namespace ringattn::worker::cuda {

absl::Status EncodeTensorMap(const char* name, void* base, const MappedTensor& tensor,
                             const MapBox& box, unsigned char (&map)[128]) {
  const auto encode = TensorMapEncoder();
  if (!encode.ok()) return encode.status();
  const cuuint64_t row_bytes = cuuint64_t{4} * tensor.head_dim;
  const cuuint64_t sizes[4] = {
      static_cast<cuuint64_t>(tensor.head_dim), static_cast<cuuint64_t>(tensor.heads),
      static_cast<cuuint64_t>(tensor.rows), static_cast<cuuint64_t>(tensor.batch)};
  const cuuint64_t strides[3] = {row_bytes, row_bytes * sizes[1],
                                 row_bytes * sizes[1] * tensor.row_pitch};
  const cuuint32_t boxes[4] = {static_cast<cuuint32_t>(box.columns), 1,
                               static_cast<cuuint32_t>(box.rows), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap encoded;
  static_assert(sizeof(encoded) == sizeof(map));
  const CUresult result =
      (*encode)(&encoded, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, base, sizes, strides, boxes,
                element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (absl::Status s = EncodingStatus(result, name); !s.ok()) return s;
  std::memcpy(map, &encoded, sizeof(map));
  return absl::OkStatus();
}

}  // namespace ringattn::worker::cuda

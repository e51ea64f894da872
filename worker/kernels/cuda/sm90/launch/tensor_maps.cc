#include "worker/kernels/cuda/sm90/launch/tensor_maps.h"

#include <algorithm>
#include <cstring>

#include "worker/kernels/cuda/launch/tensor_map_encoder.h"

namespace ringattn::worker::cuda::sm90 {

absl::Status EncodeMap(DType dtype, const MappedTensor& tensor, TensorMap& target) {
  if (tensor.data == nullptr || tensor.rows == 0 || tensor.batch == 0) return absl::OkStatus();
  const auto encode = TensorMapEncoder();
  if (!encode.ok()) return encode.status();
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[4] = {size(tensor.columns), size(tensor.heads), size(tensor.rows),
                               size(tensor.batch)};
  const cuuint64_t head_bytes = 2 * size(tensor.columns);
  const cuuint64_t row_bytes = head_bytes * size(tensor.heads);
  const cuuint64_t strides[3] = {head_bytes, row_bytes, row_bytes * size(tensor.row_pitch)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(tensor.box_heads),
                             static_cast<cuuint32_t>(tensor.box_rows), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = (*encode)(
      &map,
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      4, const_cast<void*>(tensor.data), sizes, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (absl::Status s = EncodingStatus(result, "q, k or v"); !s.ok()) return s;
  static_assert(sizeof(map) == sizeof(target));
  std::memcpy(target.bytes, &map, sizeof(map));
  return absl::OkStatus();
}

absl::Status EncodeByteMap(const ByteTensor& tensor, TensorMap& target) {
  if (std::count(tensor.sizes.begin(), tensor.sizes.end(), 0) != 0) return absl::OkStatus();
  const auto encode = TensorMapEncoder();
  if (!encode.ok()) return encode.status();
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4];
  std::copy(tensor.sizes.begin(), tensor.sizes.end(), sizes);
  std::copy(tensor.strides.begin(), tensor.strides.end(), strides);
  std::copy(tensor.box.begin(), tensor.box.end(), box);
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      (*encode)(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, tensor.data, sizes, strides, box,
                element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (absl::Status s = EncodingStatus(result, "q, k or v in e4m3"); !s.ok()) return s;
  std::memcpy(target.bytes, &map, sizeof(map));
  return absl::OkStatus();
}

}  // namespace ringattn::worker::cuda::sm90

// Tensor maps describe q, k and v to the copy engine. Host code.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_TENSOR_MAPS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_TENSOR_MAPS_H_

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "common/attention/dtype.h"
#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

// A 16-bit tensor [batch, row_pitch, heads, columns] with rows [0, rows), and the box of one copy:
// 64 columns of box_rows rows of box_heads heads. Elements outside read as zero.
struct MappedTensor {
  const void* data = nullptr;  // device, 16-byte aligned; null: the map stays empty
  int64_t columns = 0;         // a multiple of 8
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t row_pitch = 0;
  int64_t batch = 0;
  int32_t box_heads = 1;
  int32_t box_rows = 1;
};

absl::Status EncodeMap(DType dtype, const MappedTensor& tensor, TensorMap& map);

// A tensor of bytes, innermost axis first, whose innermost stride is 1, and a box whose rows are
// 128 bytes. Elements outside the sizes read as zero.
struct ByteTensor {
  void* data = nullptr;  // device, 16-byte aligned
  std::array<int64_t, 4> sizes = {};
  std::array<int64_t, 3> strides = {};  // of the outer axes, multiples of 16
  std::array<int32_t, 4> box = {};
};

absl::Status EncodeByteMap(const ByteTensor& tensor, TensorMap& map);

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_TENSOR_MAPS_H_

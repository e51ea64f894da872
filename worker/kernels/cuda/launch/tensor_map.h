// Tensor maps describe a tensor to the copy engine of compute capability 9.0 and later.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TENSOR_MAP_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TENSOR_MAP_H_

#include <cstdint>

#include "absl/status/status.h"

namespace ringattn::worker::cuda {

// An fp32 tensor [batch, row_pitch, heads, head_dim], of which kernels access rows [0, rows).
struct MappedTensor {
  int64_t head_dim = 0;  // a multiple of 4
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t batch = 0;
  int64_t row_pitch = 0;
};

// The box that one copy moves: columns by rows of one head.
struct MapBox {
  int32_t columns = 0;
  int32_t rows = 0;
};

// Writes a CUtensorMap with 128-byte swizzle to `map`. `base` is device memory, aligned to 16
// bytes; `name` appears in error messages. Returns INTERNAL with CUDA's number if the driver
// rejects the map.
absl::Status EncodeTensorMap(const char* name, void* base, const MappedTensor& tensor,
                             const MapBox& box, unsigned char (&map)[128]);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TENSOR_MAP_H_

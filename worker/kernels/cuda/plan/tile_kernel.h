// One compiled attention kernel, as seen from the host. No CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_TILE_KERNEL_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_TILE_KERNEL_H_

#include <cstdint>

#include "common/attention/dtype.h"

namespace ringattn::worker::cuda {

// A kernel that walks the tables of tile_plan.h, in the dtypes that it was compiled for; the host
// launches through the addresses. The grid is [tiles, heads or packs of heads, batch].
struct TileKernel {
  const void* bf16 = nullptr;
  const void* fp16 = nullptr;
  const void* fp32 = nullptr;
  int32_t tile_rows = 0;  // q rows
  int32_t tile_keys = 0;
  int32_t threads = 0;
  int32_t blocks_per_sm = 1;
  int32_t shared_bytes = 0;
  int32_t shared_bytes_sm90 = 0;  // on compute capability 9.0 and later; 0 = the same

  // Null if there is none.
  const void* Entry(DType dtype) const {
    switch (dtype) {
      case DType::kFloat32:
        return fp32;
      case DType::kBFloat16:
        return bf16;
      case DType::kFloat16:
        return fp16;
    }
    return nullptr;
  }
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_TILE_KERNEL_H_

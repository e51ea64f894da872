// The paged kernels for every device from compute capability 8.0 on, and for fp32: decode and
// prefill in one, in fp32 arithmetic.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_PORTABLE_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_PORTABLE_KERNELS_H_

#include <cstdint>

#include "worker/kernels/cuda/paged/step_params.h"

namespace ringattn::worker::cuda::paged {

struct PortableParams {
  ForwardParams forward;
  StepParams step;
  SplitParams split;
  const char* cache = nullptr;
  int64_t k_plane_bytes = 0;
  int64_t v_plane_bytes = 0;
  int64_t k_row_elements = 0;  // from one entry to the next
  int64_t v_row_elements = 0;
  // K and V are read 16 bytes at a time: head dims and rows are multiples of so many bytes.
  int32_t vector = 0;
};

struct PortableKernel {
  const void* fp32 = nullptr;
  const void* bf16 = nullptr;
  const void* fp16 = nullptr;
  int32_t head_dim = 0;  // the largest that it takes
  int32_t threads = 0;
  int32_t shared_bytes_fp32 = 0;
  int32_t shared_bytes_16 = 0;  // of bf16 and fp16
};

inline constexpr int32_t kPortableRows = 16;  // packed rows of a unit

// `parted`: for caches of several position parts. Take PortableParams; grid [max_columns * packs].
PortableKernel PortableKernel_d64(bool parted);
PortableKernel PortableKernel_d128(bool parted);
PortableKernel PortableKernel_d256(bool parted);

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_PORTABLE_KERNELS_H_

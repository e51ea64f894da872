// Copies a bias to a layout that the copy engine can read: rows of multiples of 16 bytes with
// consecutive elements.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_COPY_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_COPY_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ringattn::worker::cuda::sm90 {

// target[r][class * class_columns + i] = source[r][first + class + stride * i]; 0 from column `end`
// of the source on. Both are device memory.
struct BiasCopyParams {
  const void* source = nullptr;  // [rows, columns]
  void* target = nullptr;        // [rows, pitch]
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t pitch = 0;  // elements; those after the last class are not written
  int64_t first = 0;
  int64_t end = 0;
  int32_t stride = 1;
  int32_t classes = 0;
  int32_t class_columns = 0;
};

// Asynchronous. `element_bytes` is 2 or 4.
cudaError_t LaunchBiasCopy(const BiasCopyParams& params, int element_bytes, cudaStream_t stream);

// Its two kernels; they use no dynamic shared memory.
const void* BiasCopyEntry(int element_bytes);

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_COPY_H_

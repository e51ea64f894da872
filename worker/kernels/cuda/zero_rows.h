// Zeros where a bias's gradient is not stored anyway: the kernel.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_ZERO_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_ZERO_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "worker/kernels/cuda/plan/stored_rows.h"

namespace ringattn::worker::cuda {

inline constexpr int kMostStoredRows = 32;

// A tensor [planes, rows, columns] of elements of 2 or 4 bytes.
struct ZeroRowsParams {
  char* target = nullptr;
  int64_t planes = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int32_t element_bytes = 0;
  int32_t count = 0;
  StoredRows stored[kMostStoredRows];  // stays as it is; of no row twice
};

// Enqueues; the launch's error.
cudaError_t LaunchZeroRows(const ZeroRowsParams& params, cudaStream_t stream);

// All kernels that it launches.
std::vector<const void*> ZeroRowsKernels();

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_ZERO_ROWS_H_

// A kernel that zeroes the elements of a bias's gradient that no call stores.
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
  StoredRows stored[kMostStoredRows];  // keeps its values; each row at most once
};

// Enqueues the kernel and returns the launch's error.
cudaError_t LaunchZeroRows(const ZeroRowsParams& params, cudaStream_t stream);

// All kernels that the function above launches.
std::vector<const void*> ZeroRowsKernels();

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_ZERO_ROWS_H_

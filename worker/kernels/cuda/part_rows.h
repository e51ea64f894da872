// Between a tensor and one that has some of its rows and heads (PartCall): the kernels.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PART_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PART_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker::cuda {

// As PartCall; the lists in device memory.
struct PartRowsParams {
  const RowRun* runs = nullptr;
  int64_t run_count = 0;
  const int32_t* head_of = nullptr;
  char* whole = nullptr;
  char* part = nullptr;
  float* whole_lse = nullptr;
  const float* part_lse = nullptr;
  int64_t outer = 1;
  int64_t inner_bytes = 0;
  int64_t rows = 0;
  int64_t part_rows = 0;
  int64_t heads = 1;
  int64_t part_heads = 1;
  bool heads_first = false;
};

// Enqueues; the launch's error. REQUIRES: part_rows > 0, inner_bytes > 0.
cudaError_t LaunchPartRows(PartCall::Kind kind, const PartRowsParams& params, cudaStream_t stream);

// All kernels that it launches.
std::vector<const void*> PartRowsKernels();

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PART_ROWS_H_

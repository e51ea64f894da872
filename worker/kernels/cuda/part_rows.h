// Kernels that copy between a tensor and tensors with some of its rows and heads (GatherCall,
// ScatterCall).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PART_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PART_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker::cuda {

// As GatherCall, with its lists in device memory.
struct GatherParams {
  const RowRun* runs = nullptr;
  int64_t run_count = 0;
  const int32_t* head_of = nullptr;
  const char* whole = nullptr;
  char* part = nullptr;
  int64_t outer = 1;
  int64_t inner_bytes = 0;
  int64_t rows = 0;
  int64_t part_rows = 0;
  int64_t heads = 1;
  int64_t part_heads = 1;
  bool heads_first = false;
};

// As ScatterPart. Its runs are `run_count` entries of all parts' runs, from `first_run` on.
struct ScatterSource {
  const float* values = nullptr;
  const float* lse = nullptr;
  int64_t rows = 0;
  int64_t heads = 0;
  int64_t first_run = 0;
  int64_t run_count = 0;
};

// One head of a part.
struct ScatterHead {
  int32_t part = 0;
  int32_t head = 0;
};

// As ScatterCall, with its lists in device memory, one after another.
struct ScatterParams {
  const char* tables = nullptr;
  int64_t table_bytes = 0;   // a multiple of 16
  int64_t runs_offset = 0;   // RowRun, of all parts; before them ScatterSource, by part
  int64_t begin_offset = 0;  // int32_t [heads + 1]: first ScatterHead of each head of the whole
  int64_t heads_offset = 0;  // ScatterHead
  bool merges = false;
  bool heads_first = false;
  bool initial = false;
  bool final = false;
  bool fours = false;  // every row's address is a multiple of four elements'
  DType dtype = DType::kFloat32;
  int64_t outer = 1;
  int64_t rows = 0;
  int64_t heads = 1;
  int64_t width = 0;
  float* values = nullptr;
  void* result = nullptr;
  float* lse = nullptr;
  const float* sinks = nullptr;
};

// Enqueues the copy and returns the launch's error. REQUIRES: outer, part_rows, part_heads,
// inner_bytes > 0.
cudaError_t LaunchGather(const GatherParams& params, cudaStream_t stream);
// REQUIRES: outer, rows, heads, width > 0.
cudaError_t LaunchScatter(const ScatterParams& params, cudaStream_t stream);

// All kernels that the functions above launch.
std::vector<const void*> PartRowsKernels();

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PART_ROWS_H_

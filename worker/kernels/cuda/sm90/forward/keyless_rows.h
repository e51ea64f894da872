// Writes rows that see no key: see keyless_rows.cu.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_KEYLESS_ROWS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_KEYLESS_ROWS_H_

#include <cuda_runtime_api.h>

#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda::sm90 {

// `tiles`: device, tile_count tiles without ranges. dtype is a 16-bit type.
cudaError_t LaunchKeylessRows(DType dtype, const ForwardParams& params, const ForwardTile* tiles,
                              int tile_count, cudaStream_t stream);

std::vector<const void*> KeylessRowsEntries();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_KEYLESS_ROWS_H_

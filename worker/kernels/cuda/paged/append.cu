#include "worker/kernels/cuda/paged/append.h"

namespace ringattn::worker::cuda::paged {
namespace {

// Copies one token by the threads of the block. Word: 2, 4 or 16 bytes.
template <typename Word>
__device__ __forceinline__ void CopyToken(char* target, const char* source, int bytes) {
  for (int i = threadIdx.x; i < bytes / static_cast<int>(sizeof(Word)); i += kAppendThreads) {
    reinterpret_cast<Word*>(target)[i] = reinterpret_cast<const Word*>(source)[i];
  }
}

template <typename Word>
__global__ void __launch_bounds__(kAppendThreads) paged_append(const AppendParams params) {
#if __CUDA_ARCH__ >= 900
  // The attention kernel may start now. It waits for this grid's end before it reads the cache.
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const StepParams& step = params.step;
  const int row_index = blockIdx.y;
  const PagedRow row = step.rows[row_index];
  const PagedStep current = *step.step;
  if (row_index >= current.num_rows) return;
  char* const k_plane =
      params.cache + current.plane * (params.k_plane_bytes + params.v_plane_bytes);
  char* const v_plane = k_plane + params.k_plane_bytes;
  for (int token = blockIdx.x; token < row.append_tokens; token += gridDim.x) {
    const int32_t position = row.keep_length + token;
    const int32_t block = step.tables[row.table + (position >> step.block_shift)];
    const int64_t place =
        (int64_t{block} << step.block_shift) + (position & ((1 << step.block_shift) - 1));
    const int64_t source = int64_t{row.first_append} + token;
    CopyToken<Word>(k_plane + place * params.k_row_bytes, params.k + source * params.k_token_bytes,
                    params.k_token_bytes);
    CopyToken<Word>(v_plane + place * params.v_row_bytes, params.v + source * params.v_token_bytes,
                    params.v_token_bytes);
  }
}

}  // namespace

const void* AppendKernel(int access_bytes) {
  if (access_bytes == 16) return reinterpret_cast<const void*>(&paged_append<uint4>);
  if (access_bytes == 4) return reinterpret_cast<const void*>(&paged_append<uint32_t>);
  return reinterpret_cast<const void*>(&paged_append<uint16_t>);
}

}  // namespace ringattn::worker::cuda::paged

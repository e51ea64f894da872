#include "worker/kernels/cuda/paged/append.h"

namespace ringattn::worker::cuda::paged {
namespace {

// Copies some bytes by `threads` threads, of which this is number `thread`. Word: 2, 4 or 16 bytes.
template <typename Word>
__device__ __forceinline__ void CopyBytes(char* target, const char* source, int bytes, int thread,
                                          int threads) {
  for (int i = thread; i < bytes / static_cast<int>(sizeof(Word)); i += threads) {
    reinterpret_cast<Word*>(target)[i] = reinterpret_cast<const Word*>(source)[i];
  }
}

// Appends the row's new entry `token` by some threads.
template <typename Word>
__device__ __forceinline__ void AppendToken(const AppendParams& params, const PagedRow& row,
                                            int32_t plane, int32_t token, int thread, int threads) {
  const StepParams& step = params.step;
  char* const k_plane = params.cache + plane * (params.k_plane_bytes + params.v_plane_bytes);
  char* const v_plane = k_plane + params.k_plane_bytes;
  const int32_t position = row.keep_length + token;
  const int32_t block = step.tables[row.table + (position >> step.block_shift)];
  const int64_t place =
      (int64_t{block} << step.block_shift) + (position & ((1 << step.block_shift) - 1));
  const int64_t source = int64_t{row.first_append} + token;
  CopyBytes<Word>(k_plane + place * params.k_row_bytes, params.k + source * params.k_token_bytes,
                  params.k_token_bytes, thread, threads);
  CopyBytes<Word>(v_plane + place * params.v_row_bytes, params.v + source * params.v_token_bytes,
                  params.v_token_bytes, thread, threads);
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
  for (int token = blockIdx.x; token < row.append_tokens; token += gridDim.x) {
    AppendToken<Word>(params, row, current.plane, token, threadIdx.x, kAppendThreads);
  }
}

// Host memory may change between two launches: nothing that an earlier one has read may be reused.
__device__ __forceinline__ void Fetch(const FetchParams& params) {
  constexpr int kAtOnce = 4;
  const uint4* const source = reinterpret_cast<const uint4*>(params.source);
  uint4* const target = reinterpret_cast<uint4*>(params.target);
  const int words = params.bytes / 16;
  for (int first = threadIdx.x; first < words; first += kAtOnce * kFetchThreads) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kFetchThreads < words) x[i] = __ldcv(source + first + i * kFetchThreads);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kFetchThreads < words) target[first + i * kFetchThreads] = x[i];
    }
  }
}

template <typename Word>
__global__ void __launch_bounds__(kFetchThreads) paged_fetch(const FetchParams params) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  Fetch(params);
  if (!params.appends) return;
  __syncthreads();
  const StepParams& step = params.append.step;
  const PagedStep current = *step.step;
  const int num_rows = min(current.num_rows, step.max_rows);
  // A team of threads for each row: a power of two, at least a warp.
  int team = kFetchThreads;
  while (team > 32 && team * num_rows > kFetchThreads) team /= 2;
  const int thread = threadIdx.x % team;
  for (int index = threadIdx.x / team; index < num_rows; index += kFetchThreads / team) {
    const PagedRow row = step.rows[index];
    for (int token = 0; token < row.append_tokens; ++token) {
      AppendToken<Word>(params.append, row, current.plane, token, thread, team);
    }
  }
}

}  // namespace

const void* AppendKernel(int access_bytes) {
  if (access_bytes == 16) return reinterpret_cast<const void*>(&paged_append<uint4>);
  if (access_bytes == 4) return reinterpret_cast<const void*>(&paged_append<uint32_t>);
  return reinterpret_cast<const void*>(&paged_append<uint16_t>);
}

const void* FetchKernel(int access_bytes) {
  if (access_bytes == 16) return reinterpret_cast<const void*>(&paged_fetch<uint4>);
  if (access_bytes == 4) return reinterpret_cast<const void*>(&paged_fetch<uint32_t>);
  return reinterpret_cast<const void*>(&paged_fetch<uint16_t>);
}

}  // namespace ringattn::worker::cuda::paged

#include "worker/kernels/cuda/zero_rows.h"

namespace ringattn::worker::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t Clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// Both addresses are multiples of 2 bytes. Executed by one whole warp.
__device__ __forceinline__ void ZeroBytes(char* begin, char* end) {
  const int lane = threadIdx.x & 31;
  const auto up = [](char* p) {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + 15) & ~uintptr_t{15});
  };
  char* const vectors = up(begin) < end ? up(begin) : end;
  char* p = begin + lane * 2;
  if (p < vectors) *reinterpret_cast<uint16_t*>(p) = 0;
  for (p = vectors + lane * 16; p + 16 <= end; p += 32 * 16) {
    __stcs(reinterpret_cast<uint4*>(p), uint4{});
  }
  p = vectors + (end - vectors) / 16 * 16 + lane * 2;
  if (p < end) *reinterpret_cast<uint16_t*>(p) = 0;
}

// One warp per row.
__global__ void __launch_bounds__(kThreads)
    zero_rows(const __grid_constant__ ZeroRowsParams params) {
  const int64_t index = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32;
  if (index >= params.planes * params.rows) return;
  const int64_t row = index % params.rows;
  int64_t low = 0, high = 0;
#pragma unroll 1
  for (int i = 0; i < params.count; ++i) {
    const StoredRows& stored = params.stored[i];
    const int64_t r = row - stored.begin;
    if (r < 0 || r >= stored.count) continue;
    low = Clamp(stored.first + r, stored.low, stored.high);
    high = Clamp(stored.end + r, low, stored.high);
  }
  char* const begin = params.target + index * params.columns * params.element_bytes;
  ZeroBytes(begin, begin + low * params.element_bytes);
  ZeroBytes(begin + high * params.element_bytes, begin + params.columns * params.element_bytes);
}

}  // namespace

cudaError_t LaunchZeroRows(const ZeroRowsParams& params, cudaStream_t stream) {
  constexpr int64_t kRows = kThreads / 32;
  const int64_t rows = params.planes * params.rows;
  if (rows == 0 || params.columns == 0) return cudaSuccess;
  zero_rows<<<static_cast<unsigned>((rows + kRows - 1) / kRows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

std::vector<const void*> ZeroRowsKernels() { return {reinterpret_cast<const void*>(&zero_rows)}; }

}  // namespace ringattn::worker::cuda

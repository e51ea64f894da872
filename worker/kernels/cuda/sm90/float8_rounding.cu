// Rounds q, k and v to e4m3 for forward_float8.cu. Two launches: the largest magnitude of every
// batch row and kv head, over the rows that pieces name, then the rounding. Bound by memory: each
// element is read twice and written once.
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/float8_kernels.h"
#include "worker/kernels/cuda/sm90/float8_scale.cuh"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int kThreads = 256;

// What one block works on.
struct Float8Part {
  Float8Tile tile;
  int heads;    // of the tensor
  int first;    // head
  int own;      // heads of this block
  int columns;  // of the source

  __device__ Float8Part(const Float8RoundingParams& params) : tile(params.tiles[blockIdx.x]) {
    const bool query = tile.kind == kFloat8Q;
    heads = query ? params.num_heads : params.num_kv_heads;
    own = heads / params.num_kv_heads;
    first = blockIdx.y * own;
    columns = tile.kind == kFloat8V ? params.head_dim_v : params.head_dim;
  }
  // The source's row `row` of the tile, head first + `head`.
  template <typename T>
  __device__ const T* Row(int row, int head) const {
    const int64_t at =
        (blockIdx.z * tile.tensor_rows + tile.row_begin + row) * heads + first + head;
    return static_cast<const T*>(tile.source) + at * columns;
  }
  __device__ uint32_t* Largest(const Float8RoundingParams& params) const {
    return params.largest + (int64_t{tile.kind} * params.batch + blockIdx.z) * params.num_kv_heads +
           blockIdx.y;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) FindLargest(const Float8RoundingParams params) {
  if (Stopped(params.stop_word)) return;
  const Float8Part part(params);
  float largest = 0.0f;
  const int elements = part.own * part.columns;  // of a row, all heads of the block
  for (int row = threadIdx.x / 32; row < part.tile.rows; row += kThreads / 32) {
    const T* const source = part.Row<T>(row, 0);  // the heads lie side by side
    for (int i = threadIdx.x % 32; i < elements; i += 32) {
      const float size = fabsf(ToFloat(source[i]));
      if (size <= 3.402823466e38f) largest = fmaxf(largest, size);
    }
  }
  // Magnitudes are in the order of their bits.
  const uint32_t bits = __reduce_max_sync(0xffffffff, __float_as_uint(largest));
  if (threadIdx.x % 32 == 0 && bits != 0) atomicMax(part.Largest(params), bits);
}

// Four columns of a row, those beyond the source 0.
template <typename T>
__device__ __forceinline__ uint32_t Round4(const T* row, int column, int columns, float down) {
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = column + i < columns ? NanUnlessFinite(ToFloat(row[column + i])) * down : 0.0f;
  }
  return PackFloat8(x[0], x[1]) | PackFloat8(x[2], x[3]) << 16;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) Round(const Float8RoundingParams params) {
  __shared__ uint32_t tile[kFloat8TileRows][kFloat8Columns / 4 + 1];
  if (Stopped(params.stop_word)) return;
  const Float8Part part(params);
  const float down = PowerOfTwo(-Float8Exponent(*part.Largest(params)));
  char* const target = params.scratch + part.tile.target;
  const int lane = threadIdx.x % 32;
  for (int at = threadIdx.x / 32; at < part.tile.rows * part.own; at += kThreads / 32) {
    const int row = at / part.own, head = at % part.own;
    const uint32_t four = Round4(part.Row<T>(row, head), lane * 4, part.columns, down);
    if (part.tile.kind == kFloat8V) {
      tile[row][lane] = four;
      continue;
    }
    const int64_t place =
        (blockIdx.z * part.tile.tensor_rows + part.tile.row_begin + row) * part.heads + part.first +
        head;
    reinterpret_cast<uint32_t*>(target + place * kFloat8Columns)[lane] = four;
  }
  if (part.tile.kind != kFloat8V) return;  // the same for the whole block
  __syncthreads();
  // A warp has eight columns, its lanes two successive keys each.
  char* const plane =
      target +
      (int64_t{blockIdx.z} * params.num_kv_heads + blockIdx.y) * kFloat8Columns * part.tile.pitch +
      part.tile.column;
  for (int column = threadIdx.x / 32; column < kFloat8Columns; column += kThreads / 32) {
    for (int row = lane; row < part.tile.rows; row += 32) {
      plane[column * part.tile.pitch + row] =
          reinterpret_cast<const char*>(&tile[row][column / 4])[column % 4];
    }
  }
}

template <typename T>
cudaError_t Launch(const Float8RoundingParams& params, int32_t tiles, cudaStream_t stream) {
  const dim3 grid(tiles, params.num_kv_heads, params.batch);
  FindLargest<T><<<grid, kThreads, 0, stream>>>(params);
  Round<T><<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchFloat8Rounding(DType dtype, const Float8RoundingParams& params, int32_t tiles,
                                 cudaStream_t stream) {
  return dtype == DType::kFloat16 ? Launch<__half>(params, tiles, stream)
                                  : Launch<__nv_bfloat16>(params, tiles, stream);
}

std::vector<const void*> Float8RoundingEntries() {
  return {reinterpret_cast<const void*>(&FindLargest<__nv_bfloat16>),
          reinterpret_cast<const void*>(&FindLargest<__half>),
          reinterpret_cast<const void*>(&Round<__nv_bfloat16>),
          reinterpret_cast<const void*>(&Round<__half>)};
}

}  // namespace ringattn::worker::cuda::sm90

// Rounds q, k and v to e4m3 for forward_float8.cu in two launches. The first computes the largest
// magnitude of every batch row and kv head over the rows of the pieces, and the second rounds. Both
// are bound by memory: each element is read twice, in vectors of eight, and written once. The
// second launch walks backwards, so that the data that the first launch read last is still in the
// L2 cache.
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/float8/float8_kernels.h"
#include "worker/kernels/cuda/sm90/float8/float8_scale.cuh"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // vectors that a thread loads at once
constexpr int kVectorColumns = 8;

// Eight consecutive 16-bit elements; 0 for missing ones.
template <typename T>
struct Vector {
  uint4 words = {};

  __device__ __forceinline__ void Load(const T* source) {
    words = *reinterpret_cast<const uint4*>(source);
  }
  __device__ __forceinline__ float operator[](int i) const {
    const uint32_t word = (&words.x)[i / 2];
    if constexpr (__is_same(T, __half)) {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(i % 2 ? word >> 16 : word)));
    } else {
      return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    }
  }
  __device__ __forceinline__ uint2 Round(float down) const {
    float x[kVectorColumns];
#pragma unroll
    for (int i = 0; i < kVectorColumns; ++i) x[i] = NanUnlessFinite((*this)[i]) * down;
    return {PackFloat8(x[0], x[1], x[2], x[3]), PackFloat8(x[4], x[5], x[6], x[7])};
  }
};

// The rows that one block processes: `vectors` vectors per row, for the block's heads side by side.
// Rows of the copies are whole 16 bytes, so a head's last vector may have no source.
struct Float8Part {
  Float8Tile tile;
  int heads;    // of the tensor
  int first;    // head
  int own;      // heads of this block
  int columns;  // of the source
  int vectors;
  int batch, kv_head;

  __device__ Float8Part(const Float8RoundingParams& params, int tile_index, int kv_head, int batch)
      : tile(params.tiles[tile_index]), batch(batch), kv_head(kv_head) {
    const bool query = tile.kind == kFloat8Q;
    heads = query ? params.num_heads : params.num_kv_heads;
    own = heads / params.num_kv_heads;
    first = kv_head * own;
    columns = tile.kind == kFloat8V ? params.head_dim_v : params.head_dim;
    vectors = own * PerHead();
  }
  __device__ __forceinline__ int PerHead() const { return Float8RowBytes(columns) / 8; }
  __device__ __forceinline__ int64_t Row(int row) const {
    return (batch * tile.tensor_rows + tile.row_begin + row) * heads + first;
  }
  // Loads vector `at` of a row.
  template <typename T>
  __device__ __forceinline__ Vector<T> Load(int row, int at) const {
    Vector<T> vector;
    int source = at;
    if (columns % 16 != 0) {
      if (at % PerHead() == PerHead() - 1) return vector;
      source -= at / PerHead();
    }
    vector.Load(static_cast<const T*>(tile.source) + Row(row) * columns + source * kVectorColumns);
    return vector;
  }
  // Visits (row, at) for every vector of `rows` rows at the thread's stride, in batches. Calls
  // load(slot, row, at) for a whole batch before use(slot, row, at).
  template <typename LoadVector, typename Use>
  __device__ __forceinline__ void ForVectors(int rows, const LoadVector& load,
                                             const Use& use) const {
    const int step_rows = kThreads / vectors, step_at = kThreads % vectors;
    int row = threadIdx.x / vectors, at = threadIdx.x % vectors;
    while (row < rows) {
      int row_of[kBatch], at_of[kBatch];
#pragma unroll
      for (int slot = 0; slot < kBatch; ++slot) {
        row_of[slot] = row;
        at_of[slot] = at;
        if (row < rows) load(slot, row, at);
        row += step_rows;
        at += step_at;
        if (at >= vectors) {
          at -= vectors;
          ++row;
        }
      }
#pragma unroll
      for (int slot = 0; slot < kBatch; ++slot) {
        if (row_of[slot] < rows) use(slot, row_of[slot], at_of[slot]);
      }
    }
  }
  __device__ uint32_t* Largest(const Float8RoundingParams& params) const {
    return params.largest + (int64_t{tile.kind} * params.batch + batch) * params.num_kv_heads +
           kv_head;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) FindLargest(const Float8RoundingParams params) {
  if (Stopped(params.stop_word)) return;
  const Float8Part part(params, blockIdx.x, blockIdx.y, blockIdx.z);
  float largest = 0.0f;
  Vector<T> vectors[kBatch];
  part.ForVectors(
      part.tile.rows, [&](int slot, int row, int at) { vectors[slot] = part.Load<T>(row, at); },
      [&](int slot, int, int) {
#pragma unroll
        for (int i = 0; i < kVectorColumns; ++i) {
          const float size = fabsf(vectors[slot][i]);
          if (size <= 3.402823466e38f) largest = fmaxf(largest, size);
        }
      });
  // The order of magnitudes is that of their bits.
  const uint32_t bits = __reduce_max_sync(0xffffffff, __float_as_uint(largest));
  if (threadIdx.x % 32 == 0 && bits != 0) atomicMax(part.Largest(params), bits);
}

// The tile of v in shared memory, [key][word]. The words of a row are exchanged according to its
// group of 16 keys, so that lanes have no bank conflicts when keys become the inner axis.
__device__ __forceinline__ int WordOf(int row, int word) {
  return row * (kFloat8MaxColumns / 4) + (word ^ row / 16 * 4);
}

// Writes rows [0, 128) of the tile as columns, with zeros beyond the last row. Each thread writes
// 16 keys of four columns, in the order of float8_wgmma.cuh.
__device__ void WriteValues(const uint32_t* tile, const Float8Part& part, char* plane) {
  const int lane = threadIdx.x % 32;
  const int group = lane % 8, word = threadIdx.x / 32 * 4 + lane / 8;
  if (group * 16 >= part.tile.rows || word * 4 >= part.columns) return;
  uint32_t keys[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) keys[i] = tile[WordOf(group * 16 + i, word)];
  uint32_t columns[4][4];
#pragma unroll
  for (int quad = 0; quad < 4; ++quad) {
    const uint32_t low0 = __byte_perm(keys[2 * quad], keys[2 * quad + 1], 0x5140);
    const uint32_t low1 = __byte_perm(keys[2 * quad], keys[2 * quad + 1], 0x7362);
    const uint32_t high0 = __byte_perm(keys[8 + 2 * quad], keys[9 + 2 * quad], 0x5140);
    const uint32_t high1 = __byte_perm(keys[8 + 2 * quad], keys[9 + 2 * quad], 0x7362);
    columns[0][quad] = __byte_perm(low0, high0, 0x5410);
    columns[1][quad] = __byte_perm(low0, high0, 0x7632);
    columns[2][quad] = __byte_perm(low1, high1, 0x5410);
    columns[3][quad] = __byte_perm(low1, high1, 0x7632);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(plane + (word * 4 + i) * part.tile.pitch + group * 16) =
        make_uint4(columns[i][0], columns[i][1], columns[i][2], columns[i][3]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) Round(const Float8RoundingParams params) {
  __shared__ uint32_t tile[kFloat8TileRows * kFloat8MaxColumns / 4];
  if (Stopped(params.stop_word)) return;
  const Float8Part part(params, gridDim.x - 1 - blockIdx.x, gridDim.y - 1 - blockIdx.y,
                        gridDim.z - 1 - blockIdx.z);
  const float down = PowerOfTwo(-Float8Exponent(*part.Largest(params)));
  char* const target = params.scratch + part.tile.target;
  Vector<T> vectors[kBatch];
  const auto load = [&](int slot, int row, int at) {
    vectors[slot] = row < part.tile.rows ? part.Load<T>(row, at) : Vector<T>();
  };
  if (part.tile.kind != kFloat8V) {
    const int row_bytes = Float8RowBytes(part.columns);
    part.ForVectors(part.tile.rows, load, [&](int slot, int row, int at) {
      *reinterpret_cast<uint2*>(target + part.Row(row) * row_bytes + at * kVectorColumns) =
          vectors[slot].Round(down);
    });
    return;
  }
  part.ForVectors(kFloat8TileRows, load, [&](int slot, int row, int at) {
    *reinterpret_cast<uint2*>(&tile[WordOf(row, at * 2)]) = vectors[slot].Round(down);
  });
  __syncthreads();
  WriteValues(tile, part,
              target +
                  (int64_t{part.batch} * params.num_kv_heads + part.kv_head) * part.columns *
                      part.tile.pitch +
                  part.tile.column);
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

// Copies the forward's keys and values into shared memory, for each tile of the q tile's ranges.
// Missing rows become zeros. Complete after CommitCopies, WaitCopies and a barrier.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_LOADS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_LOADS_CUH_

#include <cstdint>

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/primitives/thread.cuh"

namespace ringattn::worker::cuda::sm80 {

// This thread's running source in the keys or values of one kv head. The current range's first
// token is at index `token` over the batch.
template <typename Shape>
struct RowSource {
  using T = typename Shape::T;
  using Copy = typename Shape::Copy;

  const typename Shape::Stride stride;
  const T* next = nullptr;  // of the next tile to copy

  __device__ __forceinline__ void Open(const void* tensor, int64_t token, unsigned thread,
                                       int kv_head, int columns, bool vector) {
    next = Copy::First(static_cast<const T*>(tensor) + token * stride + kv_head * columns, thread,
                       stride, vector);
  }
  __device__ __forceinline__ void Load(uint32_t target, unsigned thread, int valid_rows,
                                       int columns, bool vector) {
    Copy::Next(target, thread, next, stride, valid_rows, columns, vector);
  }
};

// Loads the keys of a tile, then its values.
template <typename Shape>
struct ForwardLoads {
  const ForwardParams& params;
  const ForwardTile& tile;
  const unsigned thread;
  RowSource<Shape> k, v;
  int index;      // of the range
  int row = 0;    // of the tile, relative to the range
  int count = 0;  // of the range

  __device__ __forceinline__ ForwardLoads(const ForwardParams& params, const ForwardTile& tile,
                                          unsigned thread)
      : params(params),
        tile(tile),
        thread(thread),
        k{typename Shape::Stride{params.common.num_kv_heads} * params.common.head_dim},
        v{typename Shape::Stride{params.common.num_kv_heads} * params.common.head_dim_v},
        index(tile.range_begin) {}

  __device__ __forceinline__ bool more() const { return index < tile.range_end; }

  // REQUIRES: more().
  __device__ __forceinline__ void OpenRange() {
    const CommonParams& common = params.common;
    const KvRange& range = params.ranges[index];
    // Read again instead of being kept in registers.
    uint32_t y = blockIdx.y, z = blockIdx.z;
    KeepHere(y);
    KeepHere(z);
    const int kv_head = static_cast<int>(y) * params.head_pack / common.group_size;
    const int64_t token = int64_t{z} * range.block_rows + range.row_begin;
    k.Open(range.k, token, thread, kv_head, common.head_dim, common.vector_qk);
    v.Open(range.v, token, thread, kv_head, common.head_dim_v, common.vector_v);
    row = 0;
    count = range.row_count;
  }
  __device__ __forceinline__ void LoadKeys(uint32_t target) {
    const CommonParams& common = params.common;
    k.Load(target, thread, count - row, common.head_dim, common.vector_qk);
  }
  // Advances to the next tile.
  __device__ __forceinline__ void LoadValues(uint32_t target) {
    const CommonParams& common = params.common;
    v.Load(target, thread, count - row, common.head_dim_v, common.vector_v);
    row += Shape::kKeys;
    if (row >= count && ++index < tile.range_end) OpenRange();
  }
};

// Loads keys one tile ahead of values (forward_wide.cuh); the caller walks the ranges.
template <typename Shape>
struct ForwardWideLoads {
  const ForwardParams& params;
  const unsigned thread;
  const int kv_head;
  const int64_t batch;
  RowSource<Shape> k, v;

  __device__ __forceinline__ ForwardWideLoads(const ForwardParams& params, unsigned thread,
                                              int kv_head, int64_t batch)
      : params(params),
        thread(thread),
        kv_head(kv_head),
        batch(batch),
        k{typename Shape::Stride{params.common.num_kv_heads} * params.common.head_dim},
        v{typename Shape::Stride{params.common.num_kv_heads} * params.common.head_dim_v} {}

  __device__ __forceinline__ void OpenKeys(const KvRange& range) {
    k.Open(range.k, Token(range), thread, kv_head, params.common.head_dim, params.common.vector_qk);
  }
  __device__ __forceinline__ void OpenValues(const KvRange& range) {
    v.Open(range.v, Token(range), thread, kv_head, params.common.head_dim_v,
           params.common.vector_v);
  }
  // `rows`: number of the range's rows that are left.
  __device__ __forceinline__ void LoadKeys(uint32_t target, int rows) {
    k.Load(target, thread, rows, params.common.head_dim, params.common.vector_qk);
  }
  __device__ __forceinline__ void LoadValues(uint32_t target, int rows) {
    v.Load(target, thread, rows, params.common.head_dim_v, params.common.vector_v);
  }

 private:
  __device__ __forceinline__ int64_t Token(const KvRange& range) const {
    return batch * range.block_rows + range.row_begin;
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_LOADS_CUH_

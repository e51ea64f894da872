// The parts of a forward kernel outside its main loop: locates a row of q, and writes one row of
// the result, merged with the previous partial.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_FORWARD_ROW_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_FORWARD_ROW_CUH_

#include <cstdint>

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/primitives/numerics.cuh"

namespace ringattn::worker::cuda {

// Returns the first element of tile row `packed_row` of q (any dtype).
template <typename T>
__device__ __forceinline__ const T* QRow(const ForwardParams& params, const ForwardTile& tile,
                                         int first_head, int64_t batch, int packed_row) {
  const CommonParams& common = params.common;
  const int pack = params.head_pack;
  const int row = pack == 1 ? packed_row : packed_row / pack;
  const int head = first_head + (pack == 1 ? 0 : packed_row % pack);
  return static_cast<const T*>(params.q) +
         ((batch * common.q_rows + tile.q_row_begin + row) * common.num_heads + head) *
             common.head_dim;
}

// Mirrors common/attention/merge.h.
struct DeviceMerge {
  float first;
  float second;
  float lse;
};
__device__ __forceinline__ DeviceMerge MergeDeviceLse(float lse_first, float lse_second) {
  const float none = NegativeInfinity();
  if (lse_first == none && lse_second == none) return {0.0f, 0.0f, none};
  const float max = lse_first > lse_second || lse_first != lse_first ? lse_first : lse_second;
  const float first = expf(lse_first - max);
  const float second = expf(lse_second - max);
  const float sum = first + second;
  return {first / sum, second / sum, max + logf(sum)};
}

// Merges the head's sink into a row that has all its keys, as one more partial (0, sink).
__device__ __forceinline__ void JoinSink(float sink, float& lse, float& weight,
                                         float& previous_weight) {
  const DeviceMerge joined = MergeDeviceLse(lse, sink);
  weight *= joined.first;
  previous_weight *= joined.first;
  lse = joined.lse;
}

// One row of the result: its destination and the weights of the merge.
struct ForwardRow {
  bool exists;
  bool partial;  // written to the split-KV buffers, unmerged
  bool read_previous;
  bool write_acc;
  bool write_out;
  int columns;
  int64_t offset;  // of column 0, in out_acc and out
  float previous_weight;
  float weight;  // of the unnormalised output
  float lse;
  float* lse_target;
  float* acc;
  void* out;

  __device__ __forceinline__ ForwardRow(const ForwardParams& params, const ForwardTile& tile,
                                        int first_head, int64_t batch, int packed_row,
                                        float new_lse, float normalizer) {
    const CommonParams& common = params.common;
    const int pack = params.head_pack;
    exists = packed_row < tile.q_rows * pack;
    if (!exists) return;
    columns = common.head_dim_v;
    partial = tile.partial_slot >= 0;
    lse = new_lse;
    weight = normalizer;
    previous_weight = 0.0f;
    read_previous = false;
    out = params.out;
    if (partial) {
      const int64_t row =
          ((int64_t{tile.partial_slot} * common.batch + batch) * (common.num_heads / pack) +
           first_head / pack) *
              params.tile_rows +
          packed_row;
      lse_target = params.partial_lse + row;
      acc = params.partial_out;
      offset = row * columns;
      write_acc = true;
      write_out = false;
      return;
    }
    const int64_t row = tile.q_row_begin + (pack == 1 ? packed_row : packed_row / pack);
    const int head = first_head + (pack == 1 ? 0 : packed_row % pack);
    lse_target = params.lse + (batch * common.num_heads + head) * common.q_rows + row;
    acc = params.out_acc;
    offset = ((batch * common.q_rows + row) * common.num_heads + head) * columns;
    write_acc = !params.final;
    write_out = params.final;
    if (!params.initial) {
      const DeviceMerge merge = MergeDeviceLse(*lse_target, new_lse);
      previous_weight = merge.first;
      weight = normalizer * merge.second;
      lse = merge.lse;
      read_previous = true;
    }
    if (params.sinks != nullptr) JoinSink(params.sinks[head], lse, weight, previous_weight);
  }

  __device__ __forceinline__ void StoreLse() const { *lse_target = lse; }

  // Writes columns column and column + 1 (column is even) of the unnormalised output.
  template <typename T>
  __device__ __forceinline__ void Store2(int column, float x0, float x1) const {
    if (column >= columns) return;
    x0 *= weight;
    x1 *= weight;
    const int64_t at = offset + column;
    if (columns % 2 == 0) {
      if (read_previous) {
        const float2 previous = *reinterpret_cast<const float2*>(acc + at);
        x0 += previous_weight * previous.x;
        x1 += previous_weight * previous.y;
      }
      if (write_acc) *reinterpret_cast<float2*>(acc + at) = make_float2(x0, x1);
      if (write_out) {
        if constexpr (sizeof(T) == 4) {
          *reinterpret_cast<float2*>(static_cast<float*>(out) + at) = make_float2(x0, x1);
        } else {
          *reinterpret_cast<uint32_t*>(static_cast<T*>(out) + at) = Pack<T>(x0, x1);
        }
      }
      return;
    }
    Store1<T>(at, x0);
    if (column + 1 < columns) Store1<T>(at + 1, x1);
  }

  template <typename T>
  __device__ __forceinline__ void Store1(int64_t at, float x) const {
    if (read_previous) x += previous_weight * acc[at];
    if (write_acc) acc[at] = x;
    if (write_out) static_cast<T*>(out)[at] = FromFloat<T>(x);
  }
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_FORWARD_ROW_CUH_

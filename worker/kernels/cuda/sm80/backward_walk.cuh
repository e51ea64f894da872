// The walk of a backward thread block over the q rows that see its keys: one range of params.ranges
// after another, for each query head, in tiles that end with their range.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_WALK_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_WALK_CUH_

#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda::sm80 {

// A range of q rows in one head. One thread describes the ranges to all threads before their use,
// because registers are too short for every thread to keep more of the walk than two numbers.
struct alignas(16) BackwardSpan {
  int32_t row_count;
  int32_t full_begin;
  int32_t full_end;
  int32_t last;       // this is the last span
  int64_t row_begin;  // of q
  int32_t range;
  int32_t head;
};
static_assert(sizeof(BackwardSpan) == 32);

// Number of spans that are kept, for tiles from the last to the next but one. Span n of the walk is
// at n modulo this.
inline constexpr int kBackwardSpans = 4;

// Writes span `number` of the thread block's walk, if it exists.
__device__ __forceinline__ void DescribeSpan(const BackwardParams& params, const BackwardTile& tile,
                                             int number, BackwardSpan* spans) {
  const int ranges = tile.range_end - tile.range_begin;
  const int head = number / ranges;
  if (head >= params.heads_per_block) return;
  const int index = tile.range_begin + number % ranges;
  const QRange& range = params.ranges[index];
  spans[number % kBackwardSpans] = {range.row_count,
                                    range.full_begin,
                                    range.full_end,
                                    number + 1 == ranges * params.heads_per_block,
                                    range.row_begin,
                                    index,
                                    static_cast<int>(blockIdx.y) * params.heads_per_block + head};
}

// The rows of a tile in a span.
struct BackwardQTile {
  const BackwardSpan* span;
  int row;   // first, relative to the span
  int rows;  // that exist

  // Returns the address of the first row in dq_acc.
  __device__ __forceinline__ float* Target(const BackwardParams& params, int64_t batch) const {
    const CommonParams& common = params.common;
    return params.dq_acc +
           ((batch * common.q_rows + span->row_begin + row) * common.num_heads + span->head) *
               common.head_dim;
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_WALK_CUH_

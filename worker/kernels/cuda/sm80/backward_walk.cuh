// The walk of a backward thread block over the q rows that see its keys: range after range
// of params.ranges, for each query head in turn, in tiles that end with their range.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_WALK_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_WALK_CUH_

#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda::sm80 {

// A range of q rows of one head: the block walks its ranges for each head in
// turn. One thread describes them to all ahead of their use, for registers are
// too short for every thread to keep more of the walk than two numbers.
struct alignas(16) BackwardSpan {
  int32_t row_count;
  int32_t full_begin;
  int32_t full_end;
  int32_t last;       // no other follows
  int64_t row_begin;  // of q
  int32_t range;
  int32_t head;
};
static_assert(sizeof(BackwardSpan) == 32);

// That are kept: of the last tile to the next but one. Span n of the walk is at n modulo this.
inline constexpr int kBackwardSpans = 4;

// Writes what span `number` of the thread block's walk is, if there is one.
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

// A tile's rows of a span.
struct BackwardQTile {
  const BackwardSpan* span;
  int row;   // first, in the span
  int rows;  // that exist

  // Where the first one starts in dq_acc.
  __device__ __forceinline__ float* Target(const BackwardParams& params, int64_t batch) const {
    const CommonParams& common = params.common;
    return params.dq_acc +
           ((batch * common.q_rows + span->row_begin + row) * common.num_heads + span->head) *
               common.head_dim;
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_WALK_CUH_

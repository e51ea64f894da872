// The producer group of a wide backward: as BackwardProducer's, but each consumer group leaves its
// panels of dq by boxes of 32 columns, then all of dv (group 0) or dk (group 1).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_WIDE_BACKWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_WIDE_BACKWARD_PRODUCER_CUH_

#include "worker/kernels/cuda/sm90/backward_producer.cuh"
#include "worker/kernels/cuda/sm90/wide_backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct WideBackwardProducer : BackwardProducer<Shape> {
  using Base = BackwardProducer<Shape>;

  // Adds the group's box, once it is full, at `column`; columns from `columns` on do not exist.
  __device__ __forceinline__ void AddBox(const TensorMap& map, int group, uint32_t& phase,
                                         int column, int columns, int head, int row) const {
    WaitBarrier(this->shared + Shape::kStagedFull + 8 * group, phase);
    phase ^= 1;
    if (column < columns) {
      StartTensorAdd(&map, this->shared + Shape::kStaged + group * Shape::kStagedBytes, column,
                     head, row, this->item.batch);
    }
    CommitBulk();
    WaitBulkReads();
    Arrive(this->shared + Shape::kStagedEmpty + 8 * group);
  }

  // Executed by one lane for consumer group `group`.
  __device__ __forceinline__ void Add(int group) const {
    const CommonParams& common = this->params.common;
    const int first = group == 0 ? 0 : Shape::kValuesPanels * kPanelColumns;
    const int end = (group == 0 ? Shape::kValuesPanels : Shape::kPanels) * kPanelColumns;
    uint32_t phase = 0;
    this->Walk([&](const QRange& range, int row, int head) {
      const TensorMap& map = this->params.query_maps[range.piece].dq;
      if (row == 0) AcquireMap(&map);
#pragma unroll 1
      for (int column = first; column < end; column += 32) {
        AddBox(map, group, phase, column, common.head_dim, head,
               static_cast<int>(range.row_begin) + row);
      }
    });
    const SumMaps& maps = this->params.sum_maps[this->item.tile->piece];
    const TensorMap& map = group == 0 ? maps.dv : maps.dk;
    const int columns = group == 0 ? common.head_dim_v : common.head_dim;
    AcquireMap(&map);
    const int kv_head = this->item.first_head / common.group_size;
#pragma unroll 1
    for (int column = 0; column < Shape::kDim; column += 32) {
      AddBox(map, group, phase, column, columns, kv_head,
             static_cast<int>(this->item.tile->row_begin));
    }
    WaitBulk();
  }

  // `warp` counts in the group and is the same in all threads of the warp.
  __device__ __forceinline__ void Run(int warp) const {
    if (warp == 1) {
      this->Describe();
    } else if ((threadIdx.x & 31) == 0) {
      if (warp == 0) {
        this->Load();
      } else {
        Add(warp - 2);
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_WIDE_BACKWARD_PRODUCER_CUH_

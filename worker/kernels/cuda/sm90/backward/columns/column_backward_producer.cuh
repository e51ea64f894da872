// The producer group of a column backward. It differs from WideBackwardProducer in that the block
// has only some of the columns, and that nothing is added in a fixed order.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_PRODUCER_CUH_

#include "worker/kernels/cuda/sm90/backward/columns/column_backward_shape.cuh"
#include "worker/kernels/cuda/sm90/backward/wide_backward_producer.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct ColumnBackwardProducer : WideBackwardProducer<Shape> {
  using Wide = WideBackwardProducer<Shape>;
  using typename Wide::BoxPosition;
  using typename Wide::SlotPosition;
  const int first_column;  // of the block

  __device__ __forceinline__ void CopyColumns(uint32_t target, uint32_t panel_bytes,
                                              uint32_t barrier, const TensorMap& map, int head,
                                              int row, uint64_t policy) const {
    ArriveExpecting(barrier, Shape::kPanels * panel_bytes);
#pragma unroll 1
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      CopyBox(target + panel * panel_bytes, &map, barrier, first_column + panel * kPanelColumns,
              head, row, this->item.batch, policy);
    }
  }

  // Copies rows of q or dout of a tile to the next slot, once it is free.
  __device__ __forceinline__ void CopyRows(SlotPosition& slot, const TensorMap& map, int head,
                                           int row) const {
    WaitBarrier(this->shared + Shape::kSlotEmpty + 8 * slot.stage, slot.phase ^ 1);
    CopyColumns(this->shared + Shape::kRowSlots + slot.stage * Shape::kRowBytes,
                Shape::kRowPanelBytes, this->shared + Shape::kSlotFull + 8 * slot.stage, map, head,
                row, kEvictLast);
    slot.Advance();
  }

  // Executed by one lane.
  __device__ __forceinline__ void Load() const {
    const SpanMaps& keys = this->params.key_maps[this->item.tile->piece];
    AcquireMap(&keys.k);
    AcquireMap(&keys.v);
    const int kv_head = this->item.first_head / this->params.common.group_size;
    const int kv_row = static_cast<int>(this->item.tile->row_begin);
    CopyColumns(this->shared + Shape::kK, Shape::kKeyPanelBytes, this->shared + Shape::kKFull,
                keys.k, kv_head, kv_row, kEvictFirst);
    CopyColumns(this->shared + Shape::kV, Shape::kKeyPanelBytes, this->shared + Shape::kVFull,
                keys.v, kv_head, kv_row, kEvictFirst);
    SlotPosition slot;
    this->Walk([&](const QRange& range, int row, int head) {
      const QueryMaps& maps = this->params.query_maps[range.piece];
      if (row == 0) {
        AcquireMap(&maps.q);
        AcquireMap(&maps.dout);
      }
      const int token = static_cast<int>(range.row_begin) + row;
      CopyRows(slot, maps.q, head, token);
      CopyRows(slot, maps.dout, head, token);
    });
  }

  // Executed by one lane for consumer group `group`.
  __device__ __forceinline__ void Add(int group) const {
    const CommonParams& common = this->params.common;
    constexpr int kGroupColumns = Shape::kGroupPanels * kPanelColumns;
    const int first = first_column + group * kGroupColumns;
    BoxPosition boxes;
    this->Walk([&](const QRange& range, int row, int head) {
      const TensorMap& map = this->params.query_maps[range.piece].dq;
      if (row == 0) AcquireMap(&map);
      const int token = static_cast<int>(range.row_begin) + row;
#pragma unroll 1
      for (int column = first; column < first + kGroupColumns; column += 32) {
        this->AddBox(map, group, boxes, column, common.head_dim, head, token);
      }
      WaitBulkReads();
      this->FreeLastBox(group, boxes);
    });
    if constexpr (StoredSums<Shape>::kPossible) {
      if (StoredSums<Shape>::Asked(this->item)) {
        WaitBulk();
        return;
      }
    }
    const SumMaps& maps = this->params.sum_maps[this->item.tile->piece];
    const TensorMap& sums = group == 0 ? maps.dv : maps.dk;
    const int columns = group == 0 ? common.head_dim_v : common.head_dim;
    AcquireMap(&sums);
    const int kv_head = this->item.first_head / common.group_size;
#pragma unroll 1
    for (int column = 0; column < Shape::kDim; column += 32) {
      this->AddBox(sums, group, boxes, first_column + column, columns, kv_head,
                   static_cast<int>(this->item.tile->row_begin));
    }
    WaitBulk();
  }

  // `warp` is the index in the group, the same in all threads of the warp.
  __device__ __forceinline__ void Run(int warp) const {
    if (warp == 1) {
      this->Describe();
    } else if ((threadIdx.x & 31) == 0) {
      if (warp == 0) {
        Load();
      } else {
        Add(warp - 2);
      }
    }
    __syncwarp();
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_PRODUCER_CUH_

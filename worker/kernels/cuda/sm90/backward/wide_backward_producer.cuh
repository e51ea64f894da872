// The producer group of a wide backward. It differs from BackwardProducer in two ways: q and dout
// share a ring of slots, and each consumer group passes its panels of dq in boxes of 32 columns,
// and at the end all of dv (group 0) or dk (group 1).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_PRODUCER_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_producer.cuh"
#include "worker/kernels/cuda/sm90/backward/wide_backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct WideBackwardProducer : BackwardProducer<Shape> {
  using SlotPosition = RingPosition<Shape::kSlots>;

  // The group's next box and the preceding one.
  struct BoxPosition {
    RingPosition<Shape::kBoxes> at;
    uint32_t last = Shape::kBoxes;  // none yet
  };

  // Adds the group's next box at `column`, once it is full; columns from `columns` on do not exist.
  // Then frees the preceding box, so that two boxes are in flight at a time.
  __device__ __forceinline__ void AddBox(const TensorMap& map, int group, BoxPosition& boxes,
                                         int column, int columns, int head, int row) const {
    const uint32_t barriers = this->shared + 8 * Shape::kBoxes * group;
    const uint32_t box = boxes.at.stage;
    WaitBarrier(barriers + Shape::kStagedFull + 8 * box, boxes.at.phase);
    if (column < columns) {
      StartTensorAdd(
          &map,
          this->shared + Shape::kStaged + group * Shape::kStagedBytes + box * Shape::kBoxBytes,
          column, head, row, this->item.batch);
    }
    CommitBulk();
    WaitEarlierBulkReads();
    if (boxes.last < Shape::kBoxes) Arrive(barriers + Shape::kStagedEmpty + 8 * boxes.last);
    boxes.last = box;
    boxes.at.Advance();
  }

  // Frees the last box. Call it once all additions have been read.
  __device__ __forceinline__ void FreeLastBox(int group, BoxPosition& boxes) const {
    if (boxes.last == Shape::kBoxes) return;
    Arrive(this->shared + 8 * Shape::kBoxes * group + Shape::kStagedEmpty + 8 * boxes.last);
    boxes.last = Shape::kBoxes;
  }

  // Copies rows of q or dout of a tile to the next slot, once it is free.
  __device__ __forceinline__ void CopyRows(SlotPosition& slot, const TensorMap& map, int head,
                                           int row) const {
    WaitBarrier(this->shared + Shape::kSlotEmpty + 8 * slot.stage, slot.phase ^ 1);
    this->Copy(this->shared + Shape::kRowSlots + slot.stage * Shape::kRowBytes,
               Shape::kRowPanelBytes, this->shared + Shape::kSlotFull + 8 * slot.stage, map, head,
               row, this->item.batch, kEvictLast);
    slot.Advance();
  }

  // Executed by one lane.
  __device__ __forceinline__ void Load() const {
    const SpanMaps& keys = this->params.key_maps[this->item.tile->piece];
    AcquireMap(&keys.k);
    AcquireMap(&keys.v);
    const int kv_head = this->item.first_head / this->params.common.group_size;
    const int kv_row = static_cast<int>(this->item.tile->row_begin);
    this->Copy(this->shared + Shape::kK, Shape::kKeyPanelBytes, this->shared + Shape::kKFull,
               keys.k, kv_head, kv_row, this->item.batch, kEvictFirst);
    bool first = true;
    SlotPosition slot;
    this->Walk([&](const QRange& range, int row, int head) {
      const QueryMaps& maps = this->params.query_maps[range.piece];
      if (this->EntersAtEnd(range, row)) {
        AcquireMap(&maps.q);
        AcquireMap(&maps.dout);
      }
      if (row == 0) {
        AcquireMap(&maps.q);
        AcquireMap(&maps.dout);
      }
      const int token = static_cast<int>(range.row_begin) + row;
      CopyRows(slot, maps.q, head, token);
      if (first) {
        this->Copy(this->shared + Shape::kV, Shape::kKeyPanelBytes, this->shared + Shape::kVFull,
                   keys.v, kv_head, kv_row, this->item.batch, kEvictFirst);
        first = false;
      }
      CopyRows(slot, maps.dout, head, token);
    });
  }

  // Executed by one lane for consumer group `group`.
  __device__ __forceinline__ void Add(int group) const {
    const CommonParams& common = this->params.common;
    const int first = group == 0 ? 0 : Shape::kValuesPanels * kPanelColumns;
    const int end = (group == 0 ? Shape::kValuesPanels : Shape::kPanels) * kPanelColumns;
    BoxPosition boxes;
    const TensorMap* map = nullptr;
    int first_row = 0;
    Turn turn;
    this->WalkRanges(
        [&](const QRange& range, int head) {
          map = &this->params.query_maps[range.piece].dq;
          AcquireMap(map);
          first_row = static_cast<int>(range.row_begin);
          turn = this->TileTurn(range, 0, head, group);
        },
        [&](int row, int head) {
          const Turn own = turn.Of(row / Shape::kRows);
          own.Await();
#pragma unroll 1
          for (int column = first; column < end; column += 32) {
            AddBox(*map, group, boxes, column, common.head_dim, head, first_row + row);
          }
          WaitBulkReads();
          FreeLastBox(group, boxes);
          own.Pass();
        });
    const SumMaps& maps = this->params.sum_maps[this->item.tile->piece];
    const TensorMap& sums = group == 0 ? maps.dv : maps.dk;
    const int columns = group == 0 ? common.head_dim_v : common.head_dim;
    AcquireMap(&sums);
    const int kv_head = this->item.first_head / common.group_size;
    this->SumTurn(group).Await();
#pragma unroll 1
    for (int column = 0; column < Shape::kDim; column += 32) {
      AddBox(sums, group, boxes, column, columns, kv_head,
             static_cast<int>(this->item.tile->row_begin));
    }
    WaitBulk();
    this->SumTurn(group).Pass();
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
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_PRODUCER_CUH_

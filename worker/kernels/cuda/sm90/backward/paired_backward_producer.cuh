// The producer group of a paired backward. It differs from BackwardProducer in two ways: q and dout
// of both blocks are filled at once, and the warp that adds the values group's staged dQ also sends
// dS to the other block.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_PRODUCER_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_producer.cuh"
#include "worker/kernels/cuda/sm90/backward/paired_backward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct PairedBackwardProducer : BackwardProducer<Shape> {
  const int rank;  // of the block

  // Fills the next slot of q or dout with rows of a tile in both blocks, once the slot is free in
  // both. The block that `copies` issues the copy. `place`, `full` and `empty` are those of the
  // first slot.
  template <int kSlots>
  __device__ __forceinline__ void FillSlot(RingPosition<kSlots>& at, int place, int full, int empty,
                                           bool copies, const TensorMap& map, int head,
                                           int row) const {
    const uint32_t barrier = this->shared + full + 8 * at.stage;
    WaitClusterBarrier(this->shared + empty + 8 * at.stage, at.phase ^ 1);
    ArriveExpecting(barrier, Shape::kRowBytes);
    if (copies) {
      const uint32_t target = this->shared + place + at.stage * Shape::kRowBytes;
#pragma unroll
      for (int panel = 0; panel < Shape::kPanels; ++panel) {
        CopyBoxToBoth(target + panel * Shape::kRowPanelBytes, &map, barrier, panel * kPanelColumns,
                      head, row, this->item.batch, kEvictLast);
      }
    }
    at.Advance();
  }

  // Executed by one lane.
  __device__ __forceinline__ void Load() const {
    const SpanMaps& keys = this->params.key_maps[this->item.tile->piece];
    AcquireMap(&keys.k);
    AcquireMap(&keys.v);
    const int batch = this->item.batch;
    const int kv_head = this->item.first_head / this->params.common.group_size;
    const int first_row = static_cast<int>(this->item.tile->row_begin);
    const int kv_row = first_row + rank * Shape::kKeys;
    this->Copy(this->shared + Shape::kK, Shape::kKeyPanelBytes, this->shared + Shape::kKFull,
               keys.k, kv_head, kv_row, batch, kEvictFirst);
    bool first = true;
    RingPosition<Shape::kStages> q_at;
    RingPosition<Shape::kDoutSlots> dout_at;
    this->Walk([&](const QRange& range, int row, int head) {
      const QueryMaps& maps = this->params.query_maps[range.piece];
      if (row == 0) AcquireMap(rank == 0 ? &maps.q : &maps.dout);
      const int token = static_cast<int>(range.row_begin) + row;
      FillSlot(q_at, Shape::kQ, Shape::kQFull, Shape::kQEmpty, rank == 0, maps.q, head, token);
      if (first) {
        this->Copy(this->shared + Shape::kV, Shape::kKeyPanelBytes, this->shared + Shape::kVFull,
                   keys.v, kv_head, kv_row, batch, kEvictFirst);
      }
      FillSlot(dout_at, Shape::kDout, Shape::kDoutFull, Shape::kDoutEmpty, rank == 1, maps.dout,
               head, token);
      if (first) {
        // Counted by the first arrival of the other block's dS (Send).
        const int other_row = first_row + (1 - rank) * Shape::kKeys;
#pragma unroll 1
        for (int group = 0; group < Shape::kGroups; ++group) {
          CopyBox(this->shared + Shape::kOtherK + group * Shape::kKeyPanelBytes, &keys.k,
                  this->shared + Shape::kOtherScoresFull,
                  Shape::FirstColumn(group, rank) & -kPanelColumns, kv_head, other_row, batch,
                  kEvictFirst);
        }
        first = false;
      }
    });
  }

  // Sends a tile's dS to the other block once it is complete. The memory for it in the other block
  // is free: the writers of this block's dS have waited for that as well.
  __device__ __forceinline__ void Send(const RingPosition<Shape::kStages>& at, bool first) const {
    const uint32_t place = at.stage * Shape::kScorePanelBytes;
    WaitBarrier(this->shared + Shape::kScoresFull + 8 * at.stage, at.phase);
    const uint32_t full = this->shared + Shape::kOtherScoresFull + 8 * at.stage;
    ArriveExpecting(full, Shape::kScorePanelBytes + (first ? Shape::kOtherKeyBytes : 0));
    const uint32_t other = 1 - rank;
    CopyToCluster(ClusterAddress(this->shared + Shape::kOtherScores + place, other),
                  this->shared + Shape::kScores + place, Shape::kScorePanelBytes,
                  ClusterAddress(full, other));
  }

  // Adds the group's staged columns of a tile's dq.
  __device__ __forceinline__ void AddDq(const TensorMap& map, int group, uint32_t& phase, int head,
                                        int row) const {
    const uint32_t barriers = this->shared + 8 * group;
    const uint32_t staged = this->shared + Shape::kStaged + Shape::StagedOffset(group);
    const int first = Shape::FirstColumn(group, rank);
    const int step = Shape::StagedColumns(group);
#pragma unroll 1
    for (int part = 0; part < Shape::DqColumns(group); part += step) {
      WaitBarrier(barriers + Shape::kStagedFull, phase);
      phase ^= 1;
#pragma unroll 1
      for (int box = 0; box * 32 < step; ++box) {
        const int column = first + part + box * 32;
        if (column < this->params.common.head_dim) {
          StartTensorAdd(&map, staged + box * Shape::kBoxBytes, column, head, row,
                         this->item.batch);
        }
      }
      CommitBulk();
      WaitBulkReads();
      Arrive(barriers + Shape::kStagedEmpty);
    }
  }

  // Executed by one lane for consumer group `group`.
  __device__ __forceinline__ void Add(int group) const {
    const CommonParams& common = this->params.common;
    uint32_t phase = 0;
    RingPosition<Shape::kStages> at;
    // The preceding tile.
    const TensorMap* map = nullptr;
    int head_before = 0, row_before = 0;
    this->Walk([&](const QRange& range, int row, int head) {
      if (group == 0) Send(at, map == nullptr);
      at.Advance();
      if (map != nullptr) AddDq(*map, group, phase, head_before, row_before);
      map = &this->params.query_maps[range.piece].dq;
      if (row == 0) AcquireMap(map);
      head_before = head;
      row_before = static_cast<int>(range.row_begin) + row;
    });
    AddDq(*map, group, phase, head_before, row_before);
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
    WaitBarrier(this->shared + Shape::kStagedFull + 8 * group, phase);
#pragma unroll 1
    for (int column = 0; column < columns; column += 32) {
      StartTensorAdd(
          &sums,
          this->shared + Shape::kSums + group * Shape::kSumBytes + column / 32 * Shape::kBoxBytes,
          column, this->item.first_head / common.group_size,
          static_cast<int>(this->item.tile->row_begin) + rank * Shape::kKeys, this->item.batch);
    }
    CommitBulk();
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

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_PRODUCER_CUH_

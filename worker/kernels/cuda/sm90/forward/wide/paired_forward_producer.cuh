// The producer lane of a paired forward: loads the block's rows of q, and its panels of the keys
// and values of both blocks.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_PRODUCER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_PRODUCER_CUH_

#include "worker/kernels/cuda/sm90/forward/wide/paired_forward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct PairedForwardProducer {
  const ForwardKernelParams& params;
  const uint32_t shared;
  const int rank;
  const int kv_head;
  const int batch;
  const uint64_t policy;

  // Fills the claimed stage with kPanels panels of 64 keys from panel `first` on. The blocks copy
  // alternate panels.
  template <int kPanels>
  __device__ __forceinline__ void Fill(uint32_t target, uint32_t full, const TensorMap& map,
                                       int first, int row) const {
    ArriveExpecting(full, kPanels * Shape::kPanelBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (((first + panel) & 1) != rank) continue;
      CopyBoxToBoth(target + panel * Shape::kPanelBytes, &map, full,
                    (first + panel) * kPanelColumns, kv_head, row, batch, policy);
    }
  }

  // `phase`: 0 and 1 for alternate tiles of the item.
  __device__ __forceinline__ void LoadKeys(uint32_t phase, KeyTile* key_tiles, const KeyTile& tile,
                                           const TensorMap& map, int row) const {
#pragma unroll 1
    for (int stage = 0; stage < Shape::kKeyStages; ++stage) {
      WaitClusterBarrier(shared + Shape::kKEmpty + 8 * stage, phase ^ 1);
      if (stage == 0) key_tiles[phase] = tile;
      Fill<Shape::kKeyPanels>(shared + Shape::kK + stage * Shape::kKStageBytes,
                              shared + Shape::kKFull + 8 * stage, map, stage * Shape::kKeyPanels,
                              row);
    }
  }
  __device__ __forceinline__ void LoadValues(uint32_t phase, const TensorMap& map, int row) const {
#pragma unroll 1
    for (int stage = 0; stage < Shape::kValueStages; ++stage) {
      WaitClusterBarrier(shared + Shape::kVEmpty + 8 * stage, phase ^ 1);
      Fill<Shape::kValuePanels>(shared + Shape::kV + stage * Shape::kVStageBytes,
                                shared + Shape::kVFull + 8 * stage, map,
                                stage * Shape::kValuePanels, row);
    }
  }

  // From the last key to the first, with values one tile after their keys: as ForwardProducer.
  __device__ __forceinline__ void LoadItem(const PairedForwardItem& item, char* memory) const {
    const ForwardTile& tile = item.slot.tile;
    const int pack = params.forward.head_pack;
    ArriveExpecting(shared + Shape::kQFull, params.q_box_bytes * Shape::kPanels);
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      CopyBox(shared + Shape::kQ + panel * Shape::kPanelBytes, &params.q_map,
              shared + Shape::kQFull, panel * kPanelColumns, item.slot.first_head,
              static_cast<int>(tile.q_row_begin) + item.first_row / pack, batch, kEvictFirst);
    }
    KeyTile* const key_tiles = reinterpret_cast<KeyTile*>(memory + Shape::kKeyTiles);
    uint32_t phase = 0;  // of the keys
    int value_piece = -1;
    int value_row = 0;
#pragma unroll 1
    for (int index = tile.range_end - 1; index >= tile.range_begin; --index) {
      const KvRange& range = params.forward.ranges[index];
      const int piece = range.piece;
      const int begin = static_cast<int>(range.row_begin);
      const int count = range.row_count;
      AcquireMap(&params.maps[piece].k);
      AcquireMap(&params.maps[piece].v);
#pragma unroll 1
      for (int row = (count - 1) / Shape::kKeys * Shape::kKeys; row >= 0; row -= Shape::kKeys) {
        int32_t flags = index == tile.range_begin && row == 0 ? KeyTile::kLast : 0;
        if (row < range.full_begin || row + Shape::kKeys > range.full_end) {
          flags |= KeyTile::kMasked;
        }
        const KeyTile key_tile = {flags, range.limits.first_lower - row,
                                  range.limits.first_upper - row, count - row};
        LoadKeys(phase, key_tiles, key_tile, params.maps[piece].k, begin + row);
        if (value_piece >= 0) LoadValues(phase ^ 1, params.maps[value_piece].v, value_row);
        phase ^= 1;
        value_piece = piece;
        value_row = begin + row;
      }
    }
    LoadValues(phase ^ 1, params.maps[value_piece].v, value_row);
  }

  // Executed by one lane.
  static __device__ __forceinline__ void Run(const ForwardKernelParams& params, char* memory,
                                             uint32_t shared, int rank) {
    const PairedForwardItem item(params, rank, Shape::kBlockRows);
    // Split keys are read by one cluster or a few.
    const uint64_t policy = item.slot.tile.partial_slot >= 0 ? kEvictFirst : kEvictLast;
    PairedForwardProducer{
        params,          shared, rank, item.slot.first_head / params.forward.common.group_size,
        item.slot.batch, policy}
        .LoadItem(item, memory);
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_PRODUCER_CUH_

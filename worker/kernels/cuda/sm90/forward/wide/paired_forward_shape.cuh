// The numbers of a paired forward, for heads wider than 256: two thread blocks in a cluster process
// 64 q rows each with the same keys. Each block loads half of every stage of keys and values, and
// the copy engine writes it to both blocks, because one block's traffic for 64 rows would exceed
// the bandwidth of the L2 cache.
//
// Each of the two consumer warpgroups of a block accumulates half of the output's columns. The
// scores group also computes the probabilities and passes them to the values group.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"

namespace ringattn::worker::cuda::sm90 {

// kDim: of q and k. A stage of K is kKeyPanels panels of 64 columns; a stage of V is two. There are
// stages for exactly one tile of keys and one of values, so that a stage's place and columns are
// known at compile time, which saves registers. Each is refilled while the others are used.
template <typename T_, int kDim_, int kKeyPanels_>
struct PairedForwardShape {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr int kDimV = 512;
  static constexpr int kKeys = 64;
  static constexpr int kBlockRows = 64;
  static constexpr int kRows = kClusterBlocks * kBlockRows;  // of an item
  static constexpr int kKeyPanels = kKeyPanels_;
  static constexpr int kThreads = 384;
  // Out of the 504 registers of a lane position over all warpgroups.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kScoresRegisters = 248;
  static constexpr int kValuesRegisters = 216;

  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kPanelBytes = 64 * kPanelRowBytes;  // of 64 rows or keys
  static constexpr int kKeyStages = kPanels / kKeyPanels;
  static constexpr int kValuePanels = 2;
  static constexpr int kValueStages = kDimV / kPanelColumns / kValuePanels;
  static constexpr int kGroupStages = kValueStages / 2;  // of them, stages of one group
  static constexpr int kStageColumns = kValuePanels * kPanelColumns;
  static constexpr int kGroupColumns = kGroupStages * kStageColumns;
  static constexpr int kKStageBytes = kKeyPanels * kPanelBytes;
  static constexpr int kVStageBytes = kValuePanels * kPanelBytes;

  // Offsets in shared memory. Probabilities: 16 bytes of each of the 128 threads, four times. The
  // weights of the last step use the same memory.
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kPanels * kPanelBytes;
  static constexpr int kV = kK + kKeyStages * kKStageBytes;
  static constexpr int kProbabilities = kV + kValueStages * kVStageBytes;
  static constexpr int kFactors = kProbabilities + 4 * 128 * 16;
  static constexpr int kLast = kFactors + 128 * 8;  // a word per warp: whether the tile is the last
  static constexpr int kKeyTiles = kLast + 4 * 4;
  static constexpr int kBarriers = kKeyTiles + 2 * static_cast<int>(sizeof(KeyTile));
  static constexpr int kQFull = kBarriers;
  static constexpr int kKFull = kQFull + 8;
  static constexpr int kKEmpty = kKFull + 8 * kKeyStages;
  static constexpr int kVFull = kKEmpty + 8 * kKeyStages;
  static constexpr int kVEmpty = kVFull + 8 * kValueStages;
  static constexpr int kStopped = kVEmpty + 8 * kValueStages;  // a word
  static constexpr int kSharedBytes = kStopped + 8;

  static_assert(kDim % kPanelColumns == 0 && kPanels % kKeyPanels == 0);
  static_assert(kKeyTiles % 16 == 0);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

// The item of a cluster, and the rows of it that a block has. Rows of packed heads are divided at a
// multiple of the pack.
struct PairedForwardItem {
  WorkSlot slot;
  int first_row;   // of the block, including packed rows
  int block_rows;  // the most rows of a block

  __device__ __forceinline__ PairedForwardItem(const ForwardKernelParams& params, int rank,
                                               int rows) {
    const CommonParams& common = params.forward.common;
    const int pack = params.forward.head_pack;
    const uint32_t packs = common.num_heads / pack;
    const uint32_t item = blockIdx.x / kClusterBlocks;
    const uint32_t section_items = static_cast<uint32_t>(params.tiles) * params.section_heads;
    const uint32_t section = item / section_items;
    const int first = section * params.section_heads;
    const uint32_t heads = min(params.section_heads, params.heads - first);
    const uint32_t rest = item - section * section_items;
    const uint32_t packed_head = first + rest % heads;
    slot.tile = params.forward.tiles[rest / heads];
    slot.first_head = packed_head % packs * pack;
    slot.batch = packed_head / packs;
    block_rows = rows / pack * pack;
    first_row = rank * block_rows;
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_SHAPE_CUH_

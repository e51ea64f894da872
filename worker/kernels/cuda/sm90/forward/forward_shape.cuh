// The numbers of one kernel: its tile, the roles of its warps, and the layout of its shared memory.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/forward/forward_params.h"
#include "worker/kernels/cuda/sm90/primitives/wgmma.cuh"

namespace ringattn::worker::cuda::sm90 {

// One work item as the consumers see it. The barriers of q protect the ring of two slots: a slot is
// rewritten only after every consumer has finished with q of the item after it. The lane that
// arrives at one barrier writes slots and key tiles. The lanes that arrive at the other barrier
// read them and distribute them to their warps, so that compute-sanitizer can also see the order.
struct WorkSlot {
  ForwardTile tile;
  int32_t first_head;
  int32_t batch;
  int32_t valid;  // 0: no more work; in kernels that merge parts: 2 + SplitPart::combine
  // For the producer. In the first slot: late keys have been awaited. In the second: the clock at
  // which the block's shift ends, or 0 for a block that stays.
  int32_t producer_word;

  // Returns the slot as lane 0 reads it.
  __device__ __forceinline__ WorkSlot Broadcast() const {
    WorkSlot copy = {};
    static_assert(sizeof(copy) % 4 == 0);
    if ((threadIdx.x & 31) == 0) copy = *this;
    uint32_t* words = reinterpret_cast<uint32_t*>(&copy);
#pragma unroll
    for (unsigned i = 0; i < sizeof(copy) / 4; ++i) {
      words[i] = __shfl_sync(0xffffffff, words[i], 0);
    }
    return copy;
  }
};

// The producer's description of the keys of a stage of K, so that the consumers need not walk the
// ranges. Row r of the tile sees its columns [lower + r, upper + r] that are below `columns`.
struct KeyTile {
  static constexpr int32_t kLast = 1;    // of the item
  static constexpr int32_t kMasked = 2;  // not every row sees every column
  int32_t flags;
  int32_t lower;
  int32_t upper;
  int32_t columns;
};

// kRows q rows by kKeys keys. Each consumer warpgroup has 64 of the rows, and one more warpgroup
// loads. With kTakeTurns the consumer groups issue their products in turn, so that the softmax of
// one runs during the products of another. kStages each of K and of V; for 128 rows three were not
// faster.
template <typename T_, int kDim_, int kRows_, int kKeys_, bool kTakeTurns_, int kStages_ = 2>
struct ForwardShape {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr bool kTakeTurns = kTakeTurns_;
  static constexpr int kStages = kStages_;
  static constexpr bool kKeysInner = false;  // of V's tiles; true: their rows are columns of v
  static constexpr bool kMergesParts = false;
  static constexpr int kGroups = kRows / 64;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kConsumerWarps = kGroups * 4;
  // Out of the 504 (two groups) or 512 (three) registers of a lane position over all warpgroups.
  static constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kGroups == 2 ? 232 : 160;

  static constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kQPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKvPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kQBytes = kPanels * kQPanelBytes;
  static constexpr int kKvBytes = kPanels * kKvPanelBytes;

  // Offsets in shared memory.
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kQBytes;
  static constexpr int kV = kK + kStages * kKvBytes;
  static constexpr int kSlots = kV + kStages * kKvBytes;
  static constexpr int kKeyTiles = kSlots + 2 * static_cast<int>(sizeof(WorkSlot));
  static constexpr int kBarriers = kKeyTiles + kStages * static_cast<int>(sizeof(KeyTile));
  static constexpr int kQFull = kBarriers;
  static constexpr int kQEmpty = kQFull + 8;
  static constexpr int kKFull = kQEmpty + 8;
  static constexpr int kKEmpty = kKFull + 8 * kStages;
  static constexpr int kVFull = kKEmpty + 8 * kStages;
  static constexpr int kVEmpty = kVFull + 8 * kStages;
  static constexpr int kSharedBytes = kVEmpty + 8 * kStages;

  static_assert(kDim % 16 == 0 && kKeys % 16 == 0 && kRows % 64 == 0);
  static_assert(kQPanelBytes % 1024 == 0 && kKvPanelBytes % 1024 == 0);
  static_assert(sizeof(WorkSlot) % 8 == 0 && sizeof(KeyTile) % 8 == 0);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_SHAPE_CUH_

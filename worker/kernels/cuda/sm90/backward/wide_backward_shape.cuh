// The numbers of a wide backward kernel (head_dim above 128): its tile, the roles of its warps, and
// the layout of its shared memory. Compile-time only; the other headers take it as `Shape`.
//
// The sums of 64 keys need as many registers here as those of 128 keys with half the dimensions
// (backward_shape.cuh). A consumer group can therefore hold dV or dK, but not both. The groups
// divide the products: the values group has S and dV, the keys group dP and dK, and each has a part
// of dQ's columns.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// 64 q rows by 64 keys. A third warpgroup loads q and dout, prepares the rows' statistics and adds
// the staged sums.
//
// q and dout of the tiles alternate in one ring of slots: q of a tile, its dout, q of the next
// tile. With 256 dimensions the ring has three slots, so that each group can have three staged
// boxes and rarely waits for the one before last to leave. The next copy to each slot still has
// half a tile's time.
template <typename T_, int kDim_, bool kCapped_>
struct WideBackwardShape : BackwardNumbers<T_, 64> {
  using BackwardNumbers<T_, 64>::kStatistics;
  using T = T_;
  using Params = BackwardKernelParams;
  using Item = BackwardItem;
  static constexpr bool kOrdered = false;  // ordered_backward_kernels.cuh
  static constexpr bool kAddsSums = false;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = 64;
  static constexpr int kKeys = 64;
  static constexpr bool kCapped = kCapped_;
  // With 192 dimensions the addends (backward_addends.cuh) take the space of a fourth box of each
  // group. With 256 there is none left.
  static constexpr bool kAddsDeltas = kDim == 192 && !kCapped;
  static constexpr bool kAddsOffsets = kAddsDeltas;
  static constexpr bool kSteepTiles = kAddsDeltas && __is_same(T, __half);
  static constexpr int kStages = 2;                                  // of the tiles' statistics
  static constexpr int kSlots = kDim == 256 ? 3 : 4;                 // of q and dout
  static constexpr int kBoxes = kDim == 256 || kAddsDeltas ? 3 : 4;  // that a group stages
  static constexpr int kGroups = 2;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kConsumerWarps = kGroups * 4;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  static constexpr int kPanels = kDim / kPanelColumns;
  // The values group computes the exponentials, so it has the smaller part of dQ's panels.
  static constexpr int kValuesPanels = kPanels / 2;
  static constexpr int kKeysPanels = kPanels - kValuesPanels;

  static constexpr int kKeyPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kRowPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kRowBytes = kPanels * kRowPanelBytes;
  static constexpr int kScorePanelBytes = kRows * kPanelRowBytes;  // dS
  static constexpr int kHandedBytes = 128 * kRows / 4 * 4;         // P, by thread
  static constexpr int kBoxBytes = kStagedRows * 128;              // 32 columns, fp32
  static constexpr int kStagedBytes = kBoxes * kBoxBytes;          // of one group

  // Offsets in shared memory.
  static constexpr int kK = 0;
  static constexpr int kV = kK + kKeyBytes;
  static constexpr int kRowSlots = kV + kKeyBytes;
  static constexpr int kScores = kRowSlots + kSlots * kRowBytes;
  static constexpr int kStaged = kScores + kScorePanelBytes;
  static constexpr int kHanded = kStaged + kGroups * kStagedBytes;
  static constexpr int kRowStatistics = kHanded + kHandedBytes;
  static constexpr int kTiles = kRowStatistics + kStages * kStatistics * 4;
  static constexpr int kAddends = kTiles + kStages * static_cast<int>(sizeof(QueryTile));
  static constexpr int kAddendBytes = kRows * 16;  // of one statistic of a tile
  static constexpr int kAddendZeros = kAddends + 2 * kStages * kAddendBytes;
  static constexpr int kKFull = kAddsDeltas ? kAddendZeros + kAddendBytes : kAddends;
  static constexpr int kVFull = kKFull + 8;
  static constexpr int kSlotFull = kVFull + 8;
  static constexpr int kSlotEmpty = kSlotFull + 8 * kSlots;
  static constexpr int kTileFull = kSlotEmpty + 8 * kSlots;
  static constexpr int kTileEmpty = kTileFull + 8 * kStages;
  static constexpr int kStagedFull = kTileEmpty + 8 * kStages;  // by group, then by box
  static constexpr int kStagedEmpty = kStagedFull + 8 * kGroups * kBoxes;
  static constexpr int kSharedBytes = kStagedEmpty + 8 * kGroups * kBoxes;

  // Named barriers; 0 is __syncthreads.
  static constexpr int kGradientsReady = 1;      // all of dS is written
  static constexpr int kProbabilitiesReady = 2;  // all of P has been passed
  static constexpr int kOwnGradientsReady = 3;   // as 1, among the threads that write it

  static_assert(kDim == 192 || kDim == 256);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_SHAPE_CUH_

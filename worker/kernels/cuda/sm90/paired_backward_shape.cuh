// The numbers of a paired backward kernel (head_dim 129 to 192): who does what, and where things
// lie in shared memory. Compile-time only; the other headers take it as `Shape`.
//
// As in a wide backward a block has the sums of 64 keys (wide_backward_shape.cuh), which alone
// would have it add 48 KiB to dq for each 64 q rows: the L2 cache, which makes these additions,
// then has the last word. So two blocks of a cluster share 128 keys: they exchange their dS, and
// each has one half of dQ's columns, of all keys. That is half the additions, and q and dout, which
// both read, come from the cache once.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_PAIRED_BACKWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_PAIRED_BACKWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/backward_shape.cuh"
#include "worker/kernels/cuda/sm90/cluster.cuh"

namespace ringattn::worker::cuda::sm90 {

// 64 q rows by 128 keys, of which the block of rank r has 64 from key 64 r on, and columns 96 r to
// 96 r + 95 of dq: its keys group one panel of 64 (panel 0 or 2), its values group one half of the
// panel between.
//
// q and dout of the tiles take turns in one ring of slots: q of a tile, its dout, q of the next.
// Block 0 copies q to both blocks, block 1 dout.
template <typename T_, int kDim_, bool kCapped_>
struct PairedBackwardShape {
  using T = T_;
  using Params = BackwardKernelParams;
  using Item = BackwardItem;
  static constexpr bool kOrdered = false;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = 64;
  static constexpr int kKeys = 64;  // of a block
  static constexpr bool kCapped = kCapped_;
  static constexpr bool kAddsDeltas = !kCapped;
  static constexpr bool kAddsOffsets = kAddsDeltas;
  static constexpr bool kSteepTiles = kAddsDeltas && __is_same(T, __half);
  static constexpr int kStages = 2;  // of the tiles' statistics, and of dS
  static constexpr int kSlots = 4;   // of q and dout
  static constexpr int kGroups = 2;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kConsumerWarps = kGroups * 4;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kValuesColumns = 32, kKeysColumns = 64;  // of a block's half of dq

  static constexpr int kKeyPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kRowPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kRowBytes = kPanels * kRowPanelBytes;
  static constexpr int kScorePanelBytes = kRows * kPanelRowBytes;  // dS of a block's keys
  static constexpr int kStagedBoxBytes = kStagedRows * 128;        // 32 columns, fp32
  // The values group stages one box, and behind it the keys group two.
  static constexpr int kStagedBytes = kStagedBoxBytes;
  static constexpr int kSumBytes = kDim / 32 * kStagedBoxBytes;  // dv or dk

  // Of a row: what is added to its scores, its delta, its lse.
  static constexpr int kOffsets = 0;
  static constexpr int kDeltas = kRows;
  static constexpr int kLse = 2 * kRows;
  static constexpr int kStatistics = 3 * kRows;  // floats

  // Shared memory, from its base.
  static constexpr int kK = 0;
  static constexpr int kV = kK + kKeyBytes;
  static constexpr int kRowSlots = kV + kKeyBytes;  // at the end dv and dk
  static constexpr int kScores = kRowSlots + kSlots * kRowBytes;
  static constexpr int kOtherScores = kScores + kStages * kScorePanelBytes;  // the other block's dS
  // The other block's keys: the panel that both have a half of, and the block's own one.
  static constexpr int kOtherK = kOtherScores + kStages * kScorePanelBytes;
  static constexpr int kOtherKeyBytes = 2 * kKeyPanelBytes;
  static constexpr int kStaged = kOtherK + kOtherKeyBytes;
  static constexpr int kRowStatistics = kStaged + 3 * kStagedBoxBytes;
  static constexpr int kTiles = kRowStatistics + kStages * kStatistics * 4;
  static constexpr int kAddends = kTiles + kStages * static_cast<int>(sizeof(QueryTile));
  static constexpr int kAddendBytes = kRows * 16;  // of one statistic of a tile
  static constexpr int kAddendZeros = kAddends + 2 * kStages * kAddendBytes;
  static constexpr int kKFull = kAddsDeltas ? kAddendZeros + kAddendBytes : kAddends;
  static constexpr int kVFull = kKFull + 8;
  static constexpr int kSlotFull = kVFull + 8;
  static constexpr int kSlotEmpty = kSlotFull + 8 * kSlots;  // in both blocks
  static constexpr int kTileFull = kSlotEmpty + 8 * kSlots;
  static constexpr int kTileEmpty = kTileFull + 8 * kStages;
  static constexpr int kScoresFull = kTileEmpty + 8 * kStages;  // dS
  static constexpr int kOtherScoresFull = kScoresFull + 8 * kStages;
  // dQ of both blocks has been computed: of dS and of what was copied of it.
  static constexpr int kScoresEmpty = kOtherScoresFull + 8 * kStages;
  static constexpr int kStagedFull = kScoresEmpty + 8 * kStages;  // by group
  static constexpr int kStagedEmpty = kStagedFull + 8 * kGroups;
  static constexpr int kStopped = kStagedEmpty + 8 * kGroups;  // whether the pair computes nothing
  static constexpr int kSharedBytes = kStopped + 8;

  // P is kept times 2^kShift, so that fp16 has no subnormals to round it to.
  static constexpr int kShift = __is_same(T, __half) ? 14 : 0;
  static constexpr float kUnshift = 1.0f / (1 << kShift);

  // Named barriers; 0 is __syncthreads.
  static constexpr int kProbabilitiesReady = 1;  // and 2, by stage: all of P is handed over
  static constexpr int kSumsReady = 3;           // nobody reads slots any more

  static_assert(kDim == 192, "three panels, of which each block has one and a half");
  static_assert(2 * kSumBytes <= kSlots * kRowBytes);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_PAIRED_BACKWARD_SHAPE_CUH_

// The numbers of a paired backward kernel (head_dim above 128): the roles of its warps and the
// layout of its shared memory. Compile-time only; the other headers take it as `Shape`.
//
// As in a wide backward, a block holds the sums of 64 keys (wide_backward_shape.cuh). Separate
// blocks would each add 48 or 64 KiB to dq for every 64 q rows, and the L2 cache, which performs
// these additions, would limit the speed. Two blocks of a cluster therefore share 128 keys. They
// exchange their dS, and each computes one half of dQ's columns for all keys. This halves the
// additions, and q and dout, which both blocks read, are read from the cache once.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"

namespace ringattn::worker::cuda::sm90 {

// 64 q rows by 128 keys; the block of rank r has the 64 keys from key 64 r on. Each consumer group
// has a panel of 64 of dQ's columns. With 192 dimensions a block's half is one and a half panels,
// and the values group has one half of the middle panel.
//
// Block 0 copies q to both blocks, block 1 copies dout. With 256 dimensions there is one slot for
// dout. It is free as soon as P^T dout has been computed, while q is kept for dS.
template <typename T_, int kDim_, bool kCapped_>
struct PairedBackwardShape : BackwardNumbers<T_, 64> {
  using BackwardNumbers<T_, 64>::kStatistics;
  using T = T_;
  using Params = BackwardKernelParams;
  using Item = BackwardItem;
  static constexpr bool kOrdered = false;
  static constexpr bool kAddsSums = false;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = 64;
  static constexpr int kKeys = 64;  // of one block
  static constexpr bool kCapped = kCapped_;
  // Only kernels with 192 dimensions have room for addends (backward_addends.cuh).
  static constexpr bool kAddsDeltas = kDim == 192 && !kCapped;
  static constexpr bool kAddsOffsets = kAddsDeltas;
  static constexpr bool kSteepTiles = kAddsDeltas && __is_same(T, __half);
  static constexpr int kStages = 2;  // of q, the tiles' statistics, and dS
  static constexpr int kDoutSlots = kDim == 192 ? 2 : 1;
  static constexpr int kGroups = 2;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kConsumerWarps = kGroups * 4;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kPanels = kDim / kPanelColumns;
  // A group's columns of dq: their number, the first one, and how many the group stages at a time.
  static constexpr int DqColumns(int group) { return kDim == 192 && group == 0 ? 32 : 64; }
  static constexpr int StagedColumns(int group) { return kDim == 192 && group == 1 ? 64 : 32; }
  static constexpr __device__ int FirstColumn(int group, int rank) {
    if (kDim == 192) return group == 0 ? kPanelColumns + rank * 32 : rank * 2 * kPanelColumns;
    return (rank * 2 + group) * kPanelColumns;
  }

  static constexpr int kKeyPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kRowPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kRowBytes = kPanels * kRowPanelBytes;
  static constexpr int kScorePanelBytes = kRows * kPanelRowBytes;  // dS for a block's keys
  static constexpr int kBoxBytes = kStagedRows * 128;              // 32 columns, fp32
  static constexpr int kSumBytes = kDim / 32 * kBoxBytes;          // dv or dk

  // Offsets in shared memory.
  static constexpr int kK = 0;
  static constexpr int kV = kK + kKeyBytes;
  static constexpr int kSums = kV;  // dv and dk, at the end
  static constexpr int kQ = kV + kKeyBytes;
  static constexpr int kDout = kQ + kStages * kRowBytes;
  static constexpr int kScores = kDout + kDoutSlots * kRowBytes;
  static constexpr int kOtherScores = kScores + kStages * kScorePanelBytes;  // the other block's dS
  static constexpr int kOtherK = kOtherScores + kStages * kScorePanelBytes;  // by group, its panel
  static constexpr int kOtherKeyBytes = kGroups * kKeyPanelBytes;
  static constexpr int kStaged = kOtherK + kOtherKeyBytes;  // by group
  static constexpr int StagedOffset(int group) { return group * StagedColumns(0) / 32 * kBoxBytes; }
  static constexpr int kRowStatistics =
      kStaged + StagedOffset(1) + StagedColumns(1) / 32 * kBoxBytes;
  static constexpr int kTiles = kRowStatistics + kStages * kStatistics * 4;
  static constexpr int kAddends = kTiles + kStages * static_cast<int>(sizeof(QueryTile));
  static constexpr int kAddendBytes = kRows * 16;  // of one statistic of a tile
  static constexpr int kAddendZeros = kAddends + 2 * kStages * kAddendBytes;
  static constexpr int kKFull = kAddsDeltas ? kAddendZeros + kAddendBytes : kAddends;
  static constexpr int kVFull = kKFull + 8;
  static constexpr int kQFull = kVFull + 8;
  static constexpr int kQEmpty = kQFull + 8 * kStages;  // in both blocks; the same for dout
  static constexpr int kDoutFull = kQEmpty + 8 * kStages;
  static constexpr int kDoutEmpty = kDoutFull + 8 * kDoutSlots;
  static constexpr int kTileFull = kDoutEmpty + 8 * kDoutSlots;
  static constexpr int kTileEmpty = kTileFull + 8 * kStages;
  static constexpr int kScoresFull = kTileEmpty + 8 * kStages;  // dS
  static constexpr int kOtherScoresFull = kScoresFull + 8 * kStages;
  // Both blocks have computed dQ from dS and from its copy.
  static constexpr int kScoresEmpty = kOtherScoresFull + 8 * kStages;
  static constexpr int kStagedFull = kScoresEmpty + 8 * kStages;  // by group
  static constexpr int kStagedEmpty = kStagedFull + 8 * kGroups;
  static constexpr int kStopped =
      kStagedEmpty + 8 * kGroups;  // whether the block has seen the stop word
  static constexpr int kSharedBytes = kStopped + 8;

  // Named barriers; 0 is __syncthreads.
  static constexpr int kProbabilitiesReady = 1;  // and 2, by stage: all of P has been passed
  static constexpr int kKeysDone = 3;            // all of the group's products have been computed
  static constexpr int kValuesDone = 4;          // the same for the values group

  static_assert(kDim == 192 || kDim == 256);
  static_assert(kSums + 2 * kSumBytes <= kScores);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_SHAPE_CUH_

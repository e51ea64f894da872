// The numbers of a column backward, for head dims from 257 to 512: the roles of its warps and the
// layout of its shared memory. Compile-time only; the other headers take it as `Shape`.
//
// The sums of 64 keys with 512 dimensions need twice the registers of a block. Two blocks of a
// cluster therefore have the same 64 keys, and each has 256 of the columns: of q, k, v and dout, of
// dq, dk and dv. The products over columns, S and dP, have one part in each block. The blocks
// exchange these parts (part_exchange.cuh), so that both have all of S and dP, and no product is
// computed twice. Otherwise a block works as in a wide backward (wide_backward_shape.cuh).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"

namespace ringattn::worker::cuda::sm90 {

// 64 q rows by 64 keys. The block of rank r has the columns from kDim * r on. Columns past the head
// dim read as zeros. q and dout of the tiles alternate in a ring of three slots.
template <typename T_, bool kCapped_>
struct ColumnBackwardShape : BackwardNumbers<T_, 64> {
  using BackwardNumbers<T_, 64>::kStatistics;
  using T = T_;
  using Params = BackwardKernelParams;
  using Item = BackwardItem;
  static constexpr bool kOrdered = false;
  static constexpr bool kAddsSums = false;
  static constexpr int kDim = 256;  // of one block
  static constexpr int kRows = 64;
  static constexpr int kKeys = 64;
  static constexpr bool kCapped = kCapped_;
  // There is no room for addends (backward_addends.cuh).
  static constexpr bool kAddsDeltas = false;
  static constexpr bool kAddsOffsets = false;
  static constexpr bool kSteepTiles = false;
  static constexpr int kStages = 2;  // of the tiles' statistics
  static constexpr int kSlots = 3;   // of q and dout
  static constexpr int kBoxes = 2;   // that a group stages
  static constexpr int kGroups = 2;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kConsumerWarps = kGroups * 4;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kValuesRegisters = 232;
  static constexpr int kKeysRegisters = 240;

  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kGroupPanels = kPanels / kGroups;  // of dQ

  static constexpr int kKeyPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kRowPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kRowBytes = kPanels * kRowPanelBytes;
  static constexpr int kScorePanelBytes = kRows * kPanelRowBytes;  // dS
  static constexpr int kPartBytes = kRows * kKeys * 4;             // of S or dP, fp32
  static constexpr int kBoxBytes = kStagedRows * 128;              // 32 columns, fp32
  static constexpr int kStagedBytes = kBoxes * kBoxBytes;          // of one group

  // Offsets in shared memory.
  static constexpr int kK = 0;
  static constexpr int kV = kK + kKeyBytes;
  static constexpr int kRowSlots = kV + kKeyBytes;
  // By group: the other block's part of S, then of dP. A tile's P and dS replace them once they
  // have been read.
  static constexpr int kParts = kRowSlots + kSlots * kRowBytes;
  static constexpr int kProbabilities = kParts;
  static constexpr int kScores = kParts + kPartBytes;
  static constexpr int kStaged = kParts + kGroups * kPartBytes;
  static constexpr int kRowStatistics = kStaged + kGroups * kStagedBytes;
  static constexpr int kTiles = kRowStatistics + kStages * kStatistics * 4;
  static constexpr int kKFull = kTiles + kStages * static_cast<int>(sizeof(QueryTile));
  static constexpr int kVFull = kKFull + 8;
  static constexpr int kSlotFull = kVFull + 8;
  static constexpr int kSlotEmpty = kSlotFull + 8 * kSlots;
  static constexpr int kTileFull = kSlotEmpty + 8 * kSlots;
  static constexpr int kTileEmpty = kTileFull + 8 * kStages;
  static constexpr int kPartFull = kTileEmpty + 8 * kStages;    // by group
  static constexpr int kPartEmpty = kPartFull + 8 * kGroups;    // of the other block's memory
  static constexpr int kStagedFull = kPartEmpty + 8 * kGroups;  // by group, then by box
  static constexpr int kStagedEmpty = kStagedFull + 8 * kGroups * kBoxes;
  static constexpr int kStopped = kStagedEmpty + 8 * kGroups * kBoxes;  // a word
  static constexpr int kSharedBytes = kStopped + 8;

  // Named barriers; 0 is __syncthreads.
  static constexpr int kGradientsReady = 1;      // all of dS is written
  static constexpr int kProbabilitiesReady = 2;  // all of P has been passed
  static constexpr int kOwnGradientsReady = 3;   // as 1, among the threads that write it

  static_assert(kPartBytes >= kScorePanelBytes && kScores % 1024 == 0);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_SHAPE_CUH_

// The numbers of the forward in e4m3: those of ForwardShape, for byte operands.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// 128 q rows by 128 keys with 64 or 128 columns, one panel each; T is the result's type.
template <typename T_, int kDim_>
struct Float8ForwardShape {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = 128;
  static constexpr int kKeys = 128;
  static constexpr bool kTakeTurns = false;  // 1 to 4% slower with them
  static constexpr bool kKeysInner = true;
  static constexpr bool kMergesParts = false;
  static constexpr int kStages = 4;
  static constexpr int kGroups = 2;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kConsumerWarps = kGroups * 4;
  // Out of the 504 registers of a lane position over all warpgroups. At 128 columns the consumers
  // need 240, and the producers spill. At 64 columns nothing spills.
  static constexpr int kProducerRegisters = kDim == 128 ? 24 : 40;
  static constexpr int kConsumerRegisters = kDim == 128 ? 240 : 232;
  static_assert(kProducerRegisters + kGroups * kConsumerRegisters <= 504, "they would never start");

  static constexpr int kPanels = 1;
  static constexpr int kQPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKvPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kQBytes = kQPanelBytes;
  static constexpr int kKvBytes = kKvPanelBytes;  // of one stage
  static constexpr int kVBytes = kDim * kPanelRowBytes;

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

  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_SHAPE_CUH_

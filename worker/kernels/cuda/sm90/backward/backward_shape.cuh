// The numbers of one backward kernel: its tile, the roles of its warps, and the layout of its
// shared memory. Compile-time only; the other headers take it as `Shape`.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_params.h"
#include "worker/kernels/cuda/sm90/primitives/wgmma.cuh"

namespace ringattn::worker::cuda::sm90 {

// The producer's description of a q tile for the consumers. Row r sees keys [lower + r, upper + r]
// of the thread block's keys. Rows from `rows` on do not exist.
struct QueryTile {
  static constexpr int32_t kLast = 1;    // of the thread block
  static constexpr int32_t kMasked = 2;  // not every row sees every key
  static constexpr int32_t kWide = 4;    // a row's lse is wide (score_rule.cuh)
  static constexpr int32_t kSteep = 8;   // a row's delta cannot be an addend, so dP includes no
                                         // delta
  int32_t flags;
  int32_t lower;
  int32_t upper;
  int32_t rows;
};

// The work of a thread block: item `index`. The first `turned_sections` sections take the table's
// tiles from its end.
struct BackwardItem {
  const BackwardTile* tile;
  int32_t first_head;
  int32_t batch;

  explicit __device__ __forceinline__ BackwardItem(const BackwardKernelParams& params,
                                                   uint32_t index = blockIdx.x,
                                                   uint32_t turned_sections = 0) {
    const uint32_t section_items =
        static_cast<uint32_t>(params.tile_count) * static_cast<uint32_t>(params.section_packs);
    const uint32_t section = index / section_items;
    const uint32_t first = section * params.section_packs;
    const uint32_t packs = min(params.section_packs, params.packs - static_cast<int32_t>(first));
    const uint32_t rest = index - section * section_items;
    const uint32_t pack = first + rest % packs;
    const uint32_t packs_per_row = params.common.num_heads / params.heads_per_block;
    const uint32_t number = rest / packs;
    tile = params.tiles + (section < turned_sections ? params.tile_count - 1 - number : number);
    first_head = static_cast<int32_t>(pack % packs_per_row * params.heads_per_block);
    batch = static_cast<int32_t>(pack / packs_per_row);
  }
};

// Numbers that the kernels of every head dim share.
template <typename T, int kRows>
struct BackwardNumbers {
  // Statistics of a row: the offset of its scores, its delta, and its lse. Statistics that are
  // addends are not stored, except the deltas of a steep tile.
  static constexpr int kOffsets = 0;
  static constexpr int kDeltas = kRows;
  static constexpr int kLse = 2 * kRows;
  static constexpr int kStatistics = 3 * kRows;  // floats

  // P is stored times 2^kShift, so that fp16 does not round it to subnormals.
  static constexpr int kShift = __is_same(T, __half) ? 14 : 0;
  static constexpr float kUnshift = 1.0f / (1 << kShift);
};

// kRows q rows by kKeys keys. Two consumer warpgroups have 64 of the keys each; a third warpgroup
// loads q and dout, prepares the rows' statistics and adds dq. kCapped_: with a softcap; a separate
// kernel, because it needs more registers. kAdds_: the rows' statistics are addends of the products
// (backward_addends.cuh) instead of being read from shared memory.
template <typename T_, int kDim_, int kRows_, bool kCapped_, bool kAdds_ = true>
struct BackwardShape : BackwardNumbers<T_, kRows_> {
  using BackwardNumbers<T_, kRows_>::kStatistics;
  using T = T_;
  using Params = BackwardKernelParams;
  using Item = BackwardItem;
  static constexpr bool kOrdered = false;   // ordered_backward_kernels.cuh
  static constexpr bool kAddsSums = false;  // never stores dk and dv (backward_stored_sums.cuh)
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = 128;
  static constexpr bool kCapped = kCapped_;
  static constexpr bool kAddsDeltas = kAdds_;
  static constexpr bool kAddsOffsets = kAdds_ && !kCapped;  // the tanh comes between
  static constexpr bool kSteepTiles = kAddsDeltas && __is_same(T, __half);  // steep tiles can occur
  static constexpr int kStages = 2;  // of q, dout, their statistics, and dS
  static constexpr int kGroups = 2;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kConsumerWarps = kGroups * 4;
  // Out of the 504 registers of a lane position over all warpgroups.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // A consumer group computes 64 rows by 64 columns of a tile's dq. Either the groups share the
  // rows, or (with one panel of columns) each has 64 rows. For 96 columns the second group, whose
  // scores come later, has 32.
  static constexpr bool kDqByRows = kRows == 128;
  static constexpr int kSecondDqColumns = kDqByRows || kDim > 96 ? 64 : 32;
  static constexpr bool kGroupsDiffer = kSecondDqColumns != 64;  // their code differs, too

  static constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kKeyPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kRowPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKeyBytes = kPanels * kKeyPanelBytes;
  static constexpr int kRowBytes = kPanels * kRowPanelBytes;
  static constexpr int kScorePanelBytes = kRows * kPanelRowBytes;  // for a group's keys
  static constexpr int kScoreBytes = kGroups * kScorePanelBytes;
  static constexpr int kStagedBoxBytes = kStagedRows * 128;  // 32 columns, fp32
  static constexpr int kStagedBytes = 2 * kStagedBoxBytes;   // of one group

  // Offsets in shared memory.
  static constexpr int kK = 0;
  static constexpr int kV = kK + kKeyBytes;
  static constexpr int kQ = kV + kKeyBytes;
  static constexpr int kDout = kQ + kStages * kRowBytes;
  static constexpr int kScores = kDout + kStages * kRowBytes;
  static constexpr int kStaged = kScores + kStages * kScoreBytes;
  static constexpr int kRowStatistics = kStaged + kGroups * kStagedBytes;
  static constexpr int kTiles = kRowStatistics + kStages * kStatistics * 4;
  static constexpr int kAddends = kTiles + kStages * static_cast<int>(sizeof(QueryTile));
  static constexpr int kAddendBytes = kRows * 16;  // of one statistic of a tile
  static constexpr int kAddendZeros = kAddends + 2 * kStages * kAddendBytes;
  static constexpr int kKFull = kAdds_ ? kAddendZeros + kAddendBytes : kAddends;
  static constexpr int kVFull = kKFull + 8;
  static constexpr int kQFull = kVFull + 8;
  static constexpr int kQEmpty = kQFull + 8 * kStages;
  static constexpr int kDoutFull = kQEmpty + 8 * kStages;
  static constexpr int kDoutEmpty = kDoutFull + 8 * kStages;
  static constexpr int kTileFull = kDoutEmpty + 8 * kStages;
  static constexpr int kTileEmpty = kTileFull + 8 * kStages;
  static constexpr int kStagedFull = kTileEmpty + 8 * kStages;  // by group
  static constexpr int kStagedEmpty = kStagedFull + 8 * kGroups;
  static constexpr int kSharedBytes = kStagedEmpty + 8 * kGroups;

  // Named barriers; 0 is __syncthreads.
  static constexpr int kGradientsReady = 1;  // all of dS is written
  static constexpr int kScoresTurn = 2;      // the second group may issue its scores
  // As 1, for the second group if the groups have separate code. (Kernels with terms use 3 and 4.)
  static constexpr int kSecondGradientsReady = 5;

  static_assert(kRows == 64 || (kRows == 128 && kPanels == 1));
  static_assert(kDqByRows || kDim - kPanelColumns <= kSecondDqColumns);
  static_assert(kDim % 16 == 0 && kDim <= 128);
  static_assert(kRowPanelBytes % 1024 == 0);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_SHAPE_CUH_

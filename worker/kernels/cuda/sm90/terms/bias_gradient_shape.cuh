// The numbers of a bias's gradient kernel: its tile, the roles of its warps, and the layout of its
// shared memory.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/terms/bias_gradient_params.h"
#include "worker/kernels/cuda/sm90/terms/terms_forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// The work of a thread block: a q tile's pairs with some of its keys, in one plane of the bias,
// summed over the heads and batch rows that share the plane.
struct BiasGradientItem {
  const ForwardTile* tile;
  int32_t plane;
  int32_t part;  // every parts-th key tile
  int32_t first_head, end_head;
  int32_t first_batch, end_batch;

  explicit __device__ __forceinline__ BiasGradientItem(const BiasGradientKernelParams& params) {
    const TermParams& terms = params.terms;
    const CommonParams& common = params.forward.common;
    const int heads = terms.bias_per_head ? common.num_heads : 1;
    const uint32_t items = static_cast<uint32_t>(params.planes) * params.parts;
    tile = params.forward.tiles + blockIdx.x / items;
    const int rest = static_cast<int>(blockIdx.x % items);
    part = rest / params.planes;
    plane = rest % params.planes;
    first_head = terms.bias_per_head ? plane % heads : 0;
    end_head = terms.bias_per_head ? first_head + 1 : common.num_heads;
    first_batch = terms.bias_per_batch ? plane / heads : 0;
    end_batch = terms.bias_per_batch ? first_batch + 1 : common.batch;
  }
};

// The producer's description of a job: one head's scores of a key tile.
struct GradientTile : TermKeyTile {
  static constexpr int32_t kNewQ = 16;   // q and dout differ from the preceding job's
  static constexpr int32_t kLastQ = 32;  // q and dout differ from the next job's
  static constexpr int32_t kNewKv = 64;  // the same for k and v
  static constexpr int32_t kLastKv = 128;
  static constexpr int32_t kFirst = 256;  // the first job of a sum
  static constexpr int32_t kStore = 512;  // the last job of a sum
  int32_t head;
  int32_t batch;
  int32_t word_shift;  // for the mask's words: a pair of 128 keys is two tiles
  int32_t unused;
  int64_t first_element;  // the gradient's element for row 0, column 0
  int64_t unused_too;
};

// 128 q rows by 64 keys: each of the two consumer groups has 64 of the rows.
template <typename T_, int kDim_>
struct BiasGradientShape {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = 128;
  static constexpr int kKeys = 64;
  static constexpr bool kBiased = true;
  static constexpr bool kDrops = true;
  static constexpr int kStages = 3;  // of K, of V, and of the jobs' descriptions
  static constexpr int kGroups = 2;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kConsumerWarps = kGroups * 4;
  static constexpr int kBiasStages = 3;  // of one group

  static constexpr int kPanels = (kDim + kPanelColumns - 1) / kPanelColumns;
  static constexpr int kQPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kKvPanelBytes = kKeys * kPanelRowBytes;
  static constexpr int kQBytes = kPanels * kQPanelBytes;
  static constexpr int kKvBytes = kPanels * kKvPanelBytes;
  static constexpr int kBiasPanelBytes = kForwardBiasRows * kPanelRowBytes;

  // Offsets in shared memory.
  static constexpr int kQ = 0;
  static constexpr int kDout = kQ + kQBytes;
  static constexpr int kK = kDout + kQBytes;
  static constexpr int kV = kK + kStages * kKvBytes;
  static constexpr int kBias = kV + kStages * kKvBytes;
  static constexpr int kTermTiles = kBias + kGroups * kBiasStages * kBiasPanelBytes;
  static constexpr int kIds = kTermTiles + kStages * static_cast<int>(sizeof(GradientTile));
  static constexpr int kIdBytes = kKeys * 4;
  static constexpr int kRowTerms = kIds + kStages * kIdBytes;
  static constexpr int kQFull = kRowTerms + kRows * static_cast<int>(sizeof(TermRow));
  static constexpr int kQEmpty = kQFull + 8;
  static constexpr int kKFull = kQEmpty + 8;
  static constexpr int kVFull = kKFull + 8 * kStages;
  static constexpr int kKvEmpty = kVFull + 8 * kStages;
  static constexpr int kTileFull = kKvEmpty + 8 * kStages;
  static constexpr int kTileEmpty = kTileFull + 8 * kStages;
  static constexpr int kBiasFull = kTileEmpty + 8 * kStages;
  static constexpr int kBiasEmpty = kBiasFull + 8 * kGroups * kBiasStages;
  static constexpr int kSharedBytes = kBiasEmpty + 8 * kGroups * kBiasStages;

  static_assert(kDim % 16 == 0 && kDim <= 128);
  static_assert(kQBytes % 1024 == 0 && kKvBytes % 1024 == 0 && kBiasPanelBytes % 1024 == 0);
  static_assert(sizeof(GradientTile) % 16 == 0 && kQFull % 8 == 0);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_SHAPE_CUH_

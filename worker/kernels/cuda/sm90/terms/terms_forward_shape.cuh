// The numbers of a forward kernel with score terms: those of the plain kernel, and the shared
// memory after the plain kernel's.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_SHAPE_CUH_

#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// The producer's description of a stage of K, with the data for its terms. Written and read like
// KeyTile, but by all lanes.
struct TermKeyTile : KeyTile {
  static constexpr int32_t kIds = 4;        // ids must be compared; they are stored with the tile
  static constexpr int32_t kMaskWords = 8;  // the mask's words must be read
  int64_t first_key;                        // position of column 0
  int64_t first_query;                      // position of row 0
  const uint32_t* words;                    // of the pair's mask
  float distance;                           // from row 0's aligned key to column 0
  int32_t batch_row;                        // document or batch row, as dropout counts it
};

// The additional description for kernels with kAlibi (terms_forward_alibi.cuh): row r's shift is
// `first` + `step` r positions.
struct AlibiKeyTile {
  float first, step;
  uint32_t offsets;  // location of B's step in its panel
  uint32_t unused;
};

// A row of an item, packed heads included. Written and read by the four lanes that have it.
struct TermRow {
  float slope;    // of ALiBi
  int32_t id;     // of segments; rows with negative ids, and missing rows, see no key
  int32_t q_row;  // in the tile of q: packed heads share one
  // In the counting of dropout.
  uint32_t query, head, batch;
  PhiloxRowPart part;
};

// kRows_ rows by 128 keys, two or three groups in turn. kBiased_, kDrops_: with a bias, with
// dropout. All kernels support ALiBi, segment ids and masks, which need few registers. kAlibi_:
// supports only ALiBi, segment ids and masks, with ALiBi as a part of the product
// (terms_forward_alibi.cuh).
//
// A bias is loaded before its scores, in panels of a group's 64 rows by 128 bytes: two per key tile
// for 16-bit elements, four for fp32. Each group has a separate ring of panels, so that a slow
// group does not delay the other.
template <typename T_, int kDim_, int kRows_, bool kBiased_, bool kDrops_, bool kAlibi_ = false>
struct TermForwardShape : ForwardShape<T_, kDim_, kRows_, 128, true> {
  using Base = ForwardShape<T_, kDim_, kRows_, 128, true>;
  static constexpr bool kBiased = kBiased_;
  static constexpr bool kDrops = kDrops_;
  static constexpr bool kAlibi = kAlibi_;
  static constexpr bool kPairsAlone = !kBiased && !kDrops;
  // Kernels with dropout and without a bias serve only calls with dropout.
  static constexpr bool kDropsAlways = kDrops && !kBiased;
  static __device__ __forceinline__ bool Drops(const TermParams& terms) {
    return kDrops && (!kBiased || terms.threshold != 0);
  }
  static constexpr int kTermTiles = (Base::kSharedBytes + 15) / 16 * 16;
  static constexpr int kWords = kTermTiles + Base::kStages * static_cast<int>(sizeof(TermKeyTile));
  static constexpr int kWordBytes = kRows_ * 4 * 4;  // of the mask, for one pair
  static constexpr int kIds = kWords + Base::kStages * kWordBytes;
  static constexpr int kIdBytes = Base::kKeys * 4;
  static constexpr int kRowTerms = kIds + Base::kStages * kIdBytes;
  static constexpr int kBiasFull = kRowTerms + kRows_ * static_cast<int>(sizeof(TermRow));
  static constexpr int kBiasStages = !kBiased ? 0 : kDim_ <= 64 ? 4 : 3;  // of one group
  static constexpr int kBiasEmpty = kBiasFull + Base::kGroups * kBiasStages * 8;
  static constexpr int kBiasPanelBytes = kForwardBiasRows * kPanelRowBytes;
  static constexpr int kBias = (kBiasEmpty + Base::kGroups * kBiasStages * 8 + 1023) / 1024 * 1024;
  static constexpr int kAlibiTiles = kBiasFull;
  static constexpr int kOffsets =
      (kAlibiTiles + Base::kStages * static_cast<int>(sizeof(AlibiKeyTile)) + 1023) / 1024 * 1024;
  static constexpr int kBiasEnd = kBias + Base::kGroups * kBiasStages * kBiasPanelBytes;
  static constexpr int kOffsetsEnd = kOffsets + Base::kKeys * kPanelRowBytes;
  static constexpr int kSharedBytes = kBiased ? kBiasEnd : kAlibi ? kOffsetsEnd : kBiasFull;
  // Producers of these kernels have more work; consumers of two groups have the rest of the 504
  // registers. With three groups producers spill once per item, or once per tile that they prepare
  // ahead.
  static constexpr int kProducerRegisters = Base::kGroups == 2 ? 72 : 32;
  static constexpr int kConsumerRegisters = Base::kGroups == 2 ? 216 : 160;

  static_assert(!kAlibi || (!kBiased && !kDrops));
  static_assert(sizeof(TermKeyTile) % 16 == 0 && kIds % 16 == 0 && kBiasFull % 8 == 0);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_SHAPE_CUH_

// The numbers of a backward kernel with score terms: those of the plain kernel, and the shared
// memory after the plain kernel's.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_SHAPE_CUH_

#include <type_traits>

#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// The producer's description of a q tile with terms.
struct TermQueryTile : QueryTile {
  static constexpr int32_t kIds = 16;        // ids must be compared; they are stored with the tile
  static constexpr int32_t kMaskWords = 32;  // the mask's words must be read
  static constexpr int32_t kBent = 64;       // ALiBi is computed for each pair: see `rate`
  static constexpr int32_t kHides = kMasked | kIds | kMaskWords;  // some pairs may be hidden
  union {
    int32_t head;  // for dropout
    // If offsets are addends and ALiBi's distance is linear in rows and keys: the rows' part of the
    // exponents is in their offsets, and that of key k is rate k. Otherwise 0.
    float rate;
  };
  int32_t batch_row;    // document or batch row, as dropout counts it
  int64_t first_query;  // position of row 0
  int64_t first_key;    // position of the thread block's key 0
  const void* words;    // of the pair's mask
  float distance;       // from row 0's aligned key to key 0
  float slope;          // of ALiBi
};

// Returns whether rows' statistics are addends of products. Dropout uses dP before delta is
// subtracted.
constexpr bool AddsStatistics(bool drops) { return !drops; }

// kBiased_, kDrops_: with a bias, with dropout. All kernels support ALiBi, segment ids and masks,
// which need few registers.
//
// A bias is loaded before its scores, in chunks of some rows by a group's 64 keys. A chunk has as
// many rows as fit kBiasChunkBytes. Each group has a separate ring of chunks.
//
// kStores_: also stores the bias's gradient (TermBackwardKernelParams::dbias), which needs
// registers of the producers.
template <typename T_, int kDim_, int kRows_, bool kBiased_, bool kDrops_, bool kStores_ = false>
struct TermBackwardShape : BackwardShape<T_, kDim_, kRows_, false, AddsStatistics(kDrops_)> {
  using Params = TermBackwardKernelParams;
  using Base = BackwardShape<T_, kDim_, kRows_, false, AddsStatistics(kDrops_)>;
  static constexpr bool kBiased = kBiased_;
  static constexpr bool kDrops = kDrops_;
  static constexpr bool kStores = kStores_;
  // Whether dropout's bits are in KeepWords.
  static constexpr bool kKeepWords = kDrops && !kBiased;
  static constexpr bool kAddsSums = kKeepWords || kStores;
  // Kernels with dropout and without a bias serve only calls with dropout.
  static __device__ __forceinline__ bool Drops(const TermParams& terms) {
    return kDrops && (!kBiased || terms.threshold != 0);
  }
  // The mask's words (terms_params.h).
  using Word = std::conditional_t<kRows_ == 128, uint32_t, uint16_t>;
  static constexpr int kTermTiles = (Base::kSharedBytes + 15) / 16 * 16;
  static constexpr int kIds = kTermTiles + Base::kStages * static_cast<int>(sizeof(TermQueryTile));
  static constexpr int kIdBytes = kRows_ * 4;
  static constexpr int kBiasFull = kIds + Base::kStages * kIdBytes;
  static constexpr int kBiasChunkBytes = BackwardBiasBytes(kRows_);
  static constexpr int kBiasStages = !kBiased ? 0 : kRows_ == 64 ? 2 : 3;  // of one group
  static constexpr int kBiasEmpty = kBiasFull + Base::kGroups * kBiasStages * 8;
  static constexpr int kBias = (kBiasEmpty + Base::kGroups * kBiasStages * 8 + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes =
      kBiased ? kBias + Base::kGroups * kBiasStages * kBiasChunkBytes : kBiasFull;
  // Named barriers after the plain kernel's.
  static constexpr int kKeepReady = Base::kScoresTurn + 1;  // of a group, and the next one's
  template <typename E>
  static constexpr int kBiasRows = BackwardBiasRows(kRows_, sizeof(E));
  // Wide sums leave 24 registers for the producers, which spill some. With fewer registers for the
  // consumers all products would be serialised (C7512).
  static constexpr int kProducerRegisters = kDim_ <= 64 ? 40 : 24;
  static constexpr int kConsumerRegisters = kDim_ <= 64 ? 232 : 240;

  static_assert(kBiased || !kStores);
  static_assert(sizeof(TermQueryTile) % 8 == 0 && kIds % 16 == 0 && kBiasFull % 8 == 0);
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_SHAPE_CUH_

// Finds the pairs of tiles that producers must load (terms_params.h).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_PAIRS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_PAIRS_CUH_

#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// Returns the plane of mask tables of `head`, the first head of a pack, if a batch row has `packs`.
__device__ __forceinline__ int64_t MaskPlane(const TermParams& terms, int batch, int pack,
                                             int packs) {
  const int64_t row = terms.mask_per_batch ? batch : 0;
  return terms.mask_per_head ? row * packs + pack : row;
}

// The classes of one batch row's and head's pairs.
struct PairClasses {
  const uint8_t* ids;   // null: none
  const uint8_t* mask;  // null: none

  static constexpr uint32_t kSeen = 1;
  static constexpr uint32_t kCheckIds = 2;
  static constexpr uint32_t kCheckMask = 4;
  static constexpr uint32_t kAll = 7;

  __device__ __forceinline__ PairClasses(const PairTables& tables, int batch, int64_t plane)
      : ids(tables.id_classes == nullptr ? nullptr
                                         : tables.id_classes + int64_t{batch} * tables.pairs),
        mask(tables.mask_classes == nullptr ? nullptr
                                            : tables.mask_classes + plane * tables.pairs) {}

  __device__ __forceinline__ uint32_t Of(int pair) const {
    const uint32_t by_ids = ids == nullptr ? kPairSeen : ids[pair];
    const uint32_t by_mask = mask == nullptr ? kPairSeen : mask[pair];
    return (by_ids & by_mask & kPairSeen) | (by_ids & kPairChecked) | (by_mask & kPairChecked) << 1;
  }
  // Returns the classes of eight rows of 32 pairs, the lane's of row i at bit 4 i, and none from
  // `count` on, in the counting of `pair`. All are read at once, because a walk over invisible
  // pairs would otherwise wait for each row in turn.
  static constexpr int kBatch = 256;
  __device__ __forceinline__ uint32_t BatchOf(int pair, int count) const {
    uint32_t batch = 0;
#pragma unroll
    for (int i = 0; i < kBatch / 32; ++i) {
      if (i * 32 < count) batch |= Of(pair + i * 32) << (4 * i);
    }
    return batch;
  }
  // The checks of a pair that must be computed although it has no visible pair: all of them.
  __device__ __forceinline__ uint32_t Everything() const {
    return kSeen | (ids == nullptr ? 0 : kCheckIds) | (mask == nullptr ? 0 : kCheckMask);
  }
};
static_assert(PairClasses::kSeen == kPairSeen && PairClasses::kCheckIds == kPairChecked);

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_PAIRS_CUH_

// Shared memory of the paged kernels: that of a forward kernel, and the jobs of the warp that
// clears what lies outside a sequence.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PAGED_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PAGED_SHAPE_CUH_

#include <cstdint>

#include "worker/kernels/cuda/paged/find_column.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::paged {

// Rows of one tile of V that the clearing warp overwrites with zeros: they belong to no key that
// the tile's queries see, and may hold anything. A weight of 0 times NaN would be NaN.
struct ClearJob {
  int32_t stage;  // of V; -1: no more jobs
  int32_t low_begin, low_end;
  int32_t high_begin, high_end;
};

// Adds to a forward kernel's shape. Jobs are a ring of one more than V's stages: a place is written
// again only after the stage of V that its job named has been left by the consumers, and the last
// place serves the message that ends the warp.
template <typename Base>
struct WithClearJobs : Base {
  static constexpr int kJobs = Base::kStages + 1;
  static constexpr int kClearJobs = Base::kSharedBytes;
  static constexpr int kJobFull =
      (kClearJobs + kJobs * static_cast<int>(sizeof(ClearJob)) + 7) / 8 * 8;
  static constexpr int kSharedBytes = kJobFull + 8 * kJobs;
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

// Decode: one consumer group of 64 packed rows, and deep stages to keep memory busy.
template <typename T, int kDim, int kKeys, int kStages>
struct DecodeShape : WithClearJobs<cuda::sm90::ForwardShape<T, kDim, 64, kKeys, false, kStages>> {
  using Base = WithClearJobs<cuda::sm90::ForwardShape<T, kDim, 64, kKeys, false, kStages>>;
  static constexpr bool kMergesParts = true;
  static constexpr int kLastPiece = Base::kSharedBytes;  // whether the item was it: a word
  static constexpr int kScratch = (kLastPiece + 8 + 15) / 16 * 16;
  static constexpr int kSharedBytes =
      kScratch + static_cast<int>(sizeof(ColumnScratch<Base::kThreads>));
  static_assert(kSharedBytes <= 232448, "more shared memory than a block can have");
};

template <typename T, int kDim, int kRows, int kKeys>
using PrefillShape = WithClearJobs<cuda::sm90::ForwardShape<T, kDim, kRows, kKeys, true>>;

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_PAGED_SHAPE_CUH_

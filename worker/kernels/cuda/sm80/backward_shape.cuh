// The numbers of one head-dim class of the backward (backward.cuh): the distribution of a tile's
// products over warps, the layout of shared memory, and the barriers. Compile-time only; the other
// headers take it as `Shape`.
//
// Shared memory: k, v [kKeys][kDim]; q, dout [2][kRows][kDim], filled by cp.async one tile ahead;
// P, dS [kRows][kKeys]; if they fit, the columns of dq that each group computes at a time, in boxes
// [columns / 32][kRows][32] fp32, 128-byte swizzle; lse and delta [2][2][kRows]; the walk over q
// tiles.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_SHAPE_CUH_

#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/sm80/backward_walk.cuh"

namespace ringattn::worker::cuda::sm80 {

// k*Warps of a product: warps along the rows of its output; the remaining factor of 4 is along the
// columns. Each product distributes its 16-row and 16-column groups over the four warps in turn
// (warp w takes groups w, w + n, ...). Every address is then one exclusive or away from the warp's
// base, for any head-dim class.
//
//  kScoreWarps_, kKvWarps_, kQWarps_  of S/dP, dK/dV and dQ
//  kQPasses_       number of passes over dQ's columns
//  kValuesPasses_  number of these passes, the first ones, that the values group computes
//  kValuesLoad_    the values group starts all copies; otherwise each group starts those of its
//                  operand. (The faster choice depends on which group has time left.)
template <typename Element, int kDim_, int kRows_, int kKeys_, int kScoreWarps_, int kKvWarps_,
          int kQWarps_, int kQPasses_, int kValuesPasses_, bool kValuesLoad_>
struct BackwardShape {
  using T = Element;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kScoreWarps = kScoreWarps_;
  static constexpr int kKvWarps = kKvWarps_;
  static constexpr int kQWarps = kQWarps_;
  static constexpr int kQPasses = kQPasses_;
  static constexpr int kValuesPasses = kValuesPasses_;
  static constexpr bool kValuesLoad = kValuesLoad_;

  static constexpr int kWarps = 4;  // of one group
  static constexpr int kGroupThreads = kWarps * 32;
  static constexpr int kThreads = 2 * kGroupThreads;
  static constexpr int kBlocksPerSm = 1;
  using Tile = SharedTile<kDim>;
  using ScoreTile = SharedTile<kKeys>;

  static constexpr int kScoreColumnWarps = kWarps / kScoreWarps;
  static constexpr int kScoreM = kRows / (16 * kScoreWarps);
  static constexpr int kScoreN = kKeys / (16 * kScoreColumnWarps);  // 16-column groups
  static constexpr int kKvColumnWarps = kWarps / kKvWarps;
  static constexpr int kKvM = kKeys / (16 * kKvWarps);
  static constexpr int kKvN = kDim / (16 * kKvColumnWarps);
  static constexpr int kQColumns = kDim / kQPasses;
  static constexpr int kQColumnWarps = kWarps / kQWarps;
  static constexpr int kQM = kRows / (16 * kQWarps);
  static constexpr int kQN = kQColumns / (16 * kQColumnWarps);
  static_assert(kScoreM * 16 * kScoreWarps == kRows && kScoreN * 16 * kScoreColumnWarps == kKeys);
  static_assert(kKvM * 16 * kKvWarps == kKeys && kKvN * 16 * kKvColumnWarps == kDim);
  static_assert(kQM * 16 * kQWarps == kRows && kQN * 16 * kQColumnWarps * kQPasses == kDim);
  static_assert(kQColumns % 32 == 0 && kValuesPasses < kQPasses);

  static constexpr int kKvBytes = kKeys * kDim * 2;
  static constexpr int kQBytes = kRows * kDim * 2;
  static constexpr int kScoreBytes = kRows * kKeys * 2;
  static constexpr int kStatisticsBytes = kRows * 4;
  static constexpr int kStagedOffset = 2 * kKvBytes + 4 * kQBytes + 2 * kScoreBytes;
  static constexpr int kSharedBytes =
      kStagedOffset + 4 * kStatisticsBytes + kBackwardSpans * int{sizeof(BackwardSpan)};
  static constexpr int kBoxBytes = kRows * 128;
  static constexpr int kPassBytes = kQColumns / 32 * kBoxBytes;
  // Parts that can be staged, first those of the gradients group: with two, one pass is added while
  // the next is written.
  static constexpr int kValuesParts = kValuesPasses > 0;
  static constexpr int kGradientsParts = kQPasses - kValuesPasses > 1 &&
                                                 kSharedBytes + (2 + kValuesParts) * kPassBytes <=
                                                     227 * 1024
                                             ? 2
                                             : 1;
  static constexpr int kLastPart =  // of the gradients group, as an offset
      (kQPasses - kValuesPasses - 1) % kGradientsParts * kPassBytes;
  static constexpr int kStagedBytes = (kValuesParts + kGradientsParts) * kPassBytes;
  static constexpr bool kStagedFits = kSharedBytes + kStagedBytes <= 227 * 1024;
  static constexpr int kSharedBytesSm90 = kSharedBytes + (kStagedFits ? kStagedBytes : 0);
#if __CUDA_ARCH__ >= 900
  static constexpr bool kStaged = kStagedFits;
#else
  static constexpr bool kStaged = false;
#endif
  static_assert(kRows <= kGroupThreads);

  // P is stored times 2^kShift, so that fp16 does not round it to subnormals.
  static constexpr int kShift = __is_same(T, __half) ? 14 : 0;
  static constexpr float kUnshift = 1.0f / (1 << kShift);

  // Named barriers; 0 is __syncthreads.
  static constexpr int kProbabilitiesReady = 1;  // the gradients group waits for P
  static constexpr int kDerivativesFree = 2;     // the values group waits until dS is unused
  static constexpr int kDerivativesReady = 3;    // the values group waits for dS
  static constexpr int kGroupBarrier = 4;        // and 5: of one group

  using ScoreAccumulator = float[kScoreM][2 * kScoreN][4];
  using KvAccumulator = float[kKvM][2 * kKvN][4];
  using QAccumulator = float[kQM][2 * kQN][4];  // of a pass
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_BACKWARD_SHAPE_CUH_

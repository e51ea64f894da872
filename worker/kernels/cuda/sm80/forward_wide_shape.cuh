// The numbers of one wide head-dim class of the forward (forward_wide.cuh): tiles, warps,
// registers and shared memory. Compile-time only; the other headers take it as `Shape`.
//
// Shared memory: q [kRows][kDim]; k and v [2][kKeys][kDim] each, filled by cp.async;
// P [kRows][kKeys]; one float per thread to exchange. Registers: the fp32 output of 32
// rows and half of the columns, the scores of 32 rows and half of the tile's keys, the
// previous tile's probabilities for them, and q's first kQSteps fragments.
//
// Halves are distributed in alternating groups of 16 (keys or columns). Every address is then one
// exclusive or away from the warp's base, for any head-dim class.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_SHAPE_CUH_

#include <cstdint>

#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/primitives/tile_copy.cuh"

namespace ringattn::worker::cuda::sm80 {

// kQSteps: how many of q's kDim / 16 fragment columns stay in registers.
template <typename Element, int kDim_, int kRows_, int kKeys_, int kQSteps_>
struct ForwardWideShape {
  using T = Element;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kQSteps = kQSteps_;
  static constexpr int kRowTiles = 2;  // m16 tiles per warp
  static constexpr int kWarps = kRows / 16;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kDimSteps = kDim / 16;
  static constexpr int kKeySteps = kKeys / 32;    // 16-key groups of a half
  static constexpr int kColumnSteps = kDim / 32;  // 16-column groups of a half
  static constexpr int kKeyTiles = 2 * kKeySteps;
  static constexpr int kAhead = 2;  // fragments of v that are loaded ahead
  static_assert(kRows % 32 == 0 && kKeys % 32 == 0 && kDim % 64 == 0);
  static_assert(kWarps / 2 < 16, "a named barrier for each pair of warps");

  static constexpr int kQBytes = kRows * kDim * 2;
  static constexpr int kKvBytes = kKeys * kDim * 2;
  static constexpr int kPBytes = kRows * kKeys * 2;
  static constexpr int kSharedBytes = kQBytes + 4 * kKvBytes + kPBytes + kThreads * 4;

  using Tile = SharedTile<kDim>;
  using ProbabilityTile = SharedTile<kKeys>;
  using Copy = TileCopy<T, kDim, kKeys, kThreads>;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Probabilities = uint32_t[kKeySteps][kRowTiles][4];
  using Output = float[kRowTiles][2 * kColumnSteps][4];
  using QFragments = uint32_t[kQSteps + 1][kRowTiles][4];
  using Stride = int64_t;  // of k's and v's rows; as an int32_t it makes d256 spill 48 bytes
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_SHAPE_CUH_

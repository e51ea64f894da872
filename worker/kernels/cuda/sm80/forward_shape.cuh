// The numbers of one head-dim class of the forward (forward.cuh): tiles, warps, registers and
// shared memory. Compile-time only; the other headers take it as `Shape`.
//
// Shared memory: q [kRows][kDim]; k and v [2][kKeys][kDim] each. Registers: the fp32 output of
// the warp's kRows / kWarps rows, the scores of one key tile, and the probabilities of 16 keys.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_SHAPE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_SHAPE_CUH_

#include <cstdint>

#include "worker/kernels/cuda/primitives/shared_tile.cuh"
#include "worker/kernels/cuda/primitives/tile_copy.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename Element, int kDim_, int kRows_, int kKeys_, int kWarps_>
struct ForwardShape {
  using T = Element;
  static constexpr int kDim = kDim_;
  static constexpr int kRows = kRows_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kThreads = kWarps_ * 32;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kRowTiles = kRows / (16 * kWarps_);  // m16 tiles per warp
  static constexpr int kDimSteps = kDim / 16;
  static constexpr int kKeySteps = kKeys / 16;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr bool kQInRegisters = kRowTiles * kDimSteps * 4 <= 32;
  // Copying a tile's values later than its keys keeps a burst of copies from blocking ldmatrix.
  // Measured: faster from head_dim 128 on, slower below.
  static constexpr bool kSpreadCopies = kDim >= 128;
  static constexpr int kQBytes = kRows * kDim * 2;
  static constexpr int kKvBytes = kKeys * kDim * 2;
  static constexpr int kSharedBytes = kQBytes + 4 * kKvBytes;

  using Tile = SharedTile<kDim>;
  using Copy = TileCopy<T, kDim, kKeys, kThreads>;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Probabilities = uint32_t[kRowTiles][4];  // of 16 keys
  using Output = float[kRowTiles][kDim / 8][4];
  using QFragments = uint32_t[kRowTiles][kDimSteps][4];
  using Stride = int32_t;  // of k's and v's rows, elements: num_kv_heads * head_dim <= 65535 * 256
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_SHAPE_CUH_

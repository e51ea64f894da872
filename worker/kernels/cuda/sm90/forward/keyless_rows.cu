// Writes rows that see no key in calls that must write them: those of the first step become (0,
// -inf), those of the last step are converted. This is a separate kernel so that the products of
// the attention kernels always follow one another.
#include "worker/kernels/cuda/primitives/forward_row.cuh"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward/keyless_rows.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int kThreads = 128;

// One block writes one tile's rows of one pack of heads, one warp per row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sm90_keyless_rows(const __grid_constant__ ForwardParams params, const ForwardTile* tiles) {
  if (Stopped(params.common.stop_word)) return;
  const ForwardTile tile = tiles[blockIdx.x];
  const int first_head = blockIdx.y * params.head_pack;
  const int64_t batch = blockIdx.z;
  const int lane = threadIdx.x & 31;
  for (int row = threadIdx.x / 32; row < tile.q_rows * params.head_pack; row += kThreads / 32) {
    const ForwardRow target(params, tile, first_head, batch, row, NegativeInfinity(), 0.0f);
    __syncwarp();  // all lanes have read the previous lse
    for (int column = lane * 2; column < params.common.head_dim_v; column += 64) {
      target.Store2<T>(column, 0.0f, 0.0f);
    }
    if (lane == 0) target.StoreLse();
  }
}

}  // namespace

cudaError_t LaunchKeylessRows(DType dtype, const ForwardParams& params, const ForwardTile* tiles,
                              int tile_count, cudaStream_t stream) {
  const dim3 grid(tile_count, params.common.num_heads / params.head_pack, params.common.batch);
  if (dtype == DType::kFloat16) {
    sm90_keyless_rows<__half><<<grid, kThreads, 0, stream>>>(params, tiles);
  } else {
    sm90_keyless_rows<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(params, tiles);
  }
  return cudaGetLastError();
}

std::vector<const void*> KeylessRowsEntries() {
  return {reinterpret_cast<const void*>(&sm90_keyless_rows<__nv_bfloat16>),
          reinterpret_cast<const void*>(&sm90_keyless_rows<__half>)};
}

}  // namespace ringattn::worker::cuda::sm90

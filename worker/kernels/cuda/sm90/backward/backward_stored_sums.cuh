// dk and dv of a thread block that processes all queries of its keys: rounded and stored from the
// accumulators. Blocks that share keys add to fp32 sums instead. Those sums must be zeroed first
// and converted afterwards, which moves six times the bytes.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_STORED_SUMS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_STORED_SUMS_CUH_

#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/quad_transpose.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct StoredSums {
  using T = typename Shape::T;
  static constexpr int kDim = Shape::kDim;
  // Ordered kernels always add. Kernels with a softcap, with dropout alone, or with a bias's
  // gradient also add, because they have no registers left.
  static constexpr bool kPossible = !Shape::kOrdered && !Shape::kCapped && !Shape::kAddsSums;

  // Returns whether the block stores; the answer is the same for dk and dv.
  static __device__ __forceinline__ bool Asked(const BackwardItem& item) {
    return item.tile->dk != nullptr;
  }

  // Stores the thread's two rows of dk or dv, times `scale`: rows `key` and `key` + 8 of the
  // block's. `target` is the tensor, with `columns` columns. The sums begin at `first_column`.
  static __device__ __forceinline__ void Store(const CommonParams& common, const BackwardItem& item,
                                               void* target, int columns, int key,
                                               const float (&sum)[kDim / 2], float scale,
                                               int first_column = 0) {
    const int q = threadIdx.x & 3;
    const BackwardTile& tile = *item.tile;
    const int kv_head = item.first_head / common.group_size;
    const int rows = tile.rows;
    const int64_t first = item.batch * tile.block_rows + tile.row_begin + key;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = key + half * 8 < rows;
      T* const row = static_cast<T*>(target) +
                     ((first + half * 8) * common.num_kv_heads + kv_head) * columns + q * 8;
#pragma unroll
      for (int group = 0; group < kDim / 32; ++group) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = (group * 4 + j) * 4 + half * 2;
          words[j] = Pack<T>(scale * sum[at], scale * sum[at + 1]);
        }
        TransposeQuad(words, q);
        if (exists && first_column + group * 32 + q * 8 < columns) {
          *reinterpret_cast<uint4*>(row + first_column + group * 32) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_STORED_SUMS_CUH_

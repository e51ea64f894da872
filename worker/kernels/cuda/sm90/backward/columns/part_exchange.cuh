// The exchange of a tile's scores between the two blocks of a column backward. Each block has
// computed them from its own columns. A group's thread sends its accumulators to the thread of the
// same number in the other block, and adds what it receives. Both blocks compute the same sums,
// because two addends have one order.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_PART_EXCHANGE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_PART_EXCHANGE_CUH_

#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::sm90 {

// Stores 16 bytes in the other block's shared memory, whose barrier counts them.
__device__ __forceinline__ void StoreCluster16(uint32_t cluster_target, float a, float b, float c,
                                               float d, uint32_t cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(cluster_target),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(cluster_barrier)
      : "memory");
}

template <typename Shape>
struct PartExchange {
  static constexpr int kCount = Shape::kRows / 2;  // accumulators of a thread
  static constexpr int kVectorBytes = 128 * 16;    // one vector of each thread

  const uint32_t shared;
  const uint32_t other;  // rank of the other block
  const uint32_t group;

  // The thread's first vector of the part that its group, or group `of_group`, receives.
  __device__ __forceinline__ uint32_t Place(uint32_t of_group) const {
    return shared + Shape::kParts + of_group * Shape::kPartBytes + (threadIdx.x & 127) * 16;
  }

  // Sends the thread's accumulators. `phase`: of the tile, 0 and 1 alternately.
  __device__ __forceinline__ void Send(const float (&scores)[kCount], uint32_t phase) const {
    WaitClusterBarrier(shared + Shape::kPartEmpty + 8 * group, phase ^ 1);
    const uint32_t target = ClusterAddress(Place(group), other);
    const uint32_t full = ClusterAddress(shared + Shape::kPartFull + 8 * group, other);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      StoreCluster16(target + i * kVectorBytes, scores[i * 4], scores[i * 4 + 1], scores[i * 4 + 2],
                     scores[i * 4 + 3], full);
    }
  }

  // Adds the other block's part to the thread's accumulators.
  __device__ __forceinline__ void Receive(float (&scores)[kCount], uint32_t phase) const {
    const uint32_t full = shared + Shape::kPartFull + 8 * group;
    if ((threadIdx.x & 127) == 0) ArriveExpecting(full, Shape::kPartBytes);
    WaitClusterBarrier(full, phase);
    const uint32_t source = Place(group);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      float part[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3])
                   : "r"(source + i * kVectorBytes)
                   : "memory");
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i * 4 + j] += part[j];
    }
  }

  // The warp has finished with the memory of `of_group`'s part: the other block may write the next
  // one.
  __device__ __forceinline__ void Release(uint32_t of_group) const {
    __syncwarp();
    if (kAllArrive || threadIdx.x % 32 == 0) {
      ArriveCluster(ClusterAddress(shared + Shape::kPartEmpty + 8 * of_group, other));
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_PART_EXCHANGE_CUH_

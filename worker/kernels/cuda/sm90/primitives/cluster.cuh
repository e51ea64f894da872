// Communication between the two thread blocks of a cluster: barriers of the other block, and copies
// into its shared memory. Both blocks have the same layout. A location is given by its offset from
// the base, or by its shared address in the calling block.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_CLUSTER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_CLUSTER_CUH_

#include <cstdint>

#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::sm90 {

inline constexpr int kClusterBlocks = 2;

// Returns 0 or 1.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Converts a shared address of this block to the cluster address of the same location in the block
// of that rank.
__device__ __forceinline__ uint32_t ClusterAddress(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
// Converts a shared address of this block to the form of operands' descriptors. In a cluster, bits
// above bit 17 of shared addresses hold the block's rank.
__device__ __forceinline__ uint32_t OperandAddress(uint32_t address) { return address & 0x3ffff; }
// Call it only after the other block has started (SyncCluster) and before it ends.
__device__ __forceinline__ uint32_t LoadCluster(uint32_t cluster_address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(cluster_address) : "memory");
  return value;
}

// Executed by every warp of both blocks, as whole warps. Writes before it are visible after it.
__device__ __forceinline__ void SyncCluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Signals that data has been read. It orders no writes for the other block, because that would take
// a fence of the whole device.
__device__ __forceinline__ void ArriveCluster(uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}
// Waits for a barrier of this block at which threads of the other block arrive.
__device__ __forceinline__ void WaitClusterBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// As CopyBox, to both blocks at once: the barrier of each block counts the bytes.
__device__ __forceinline__ void CopyBoxToBoth(uint32_t target, const void* map, uint32_t barrier,
                                              int column, int head, int row, int batch,
                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(
          target),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(batch),
      "h"(static_cast<uint16_t>(0b11)), "l"(policy)
      : "memory");
}

// Copies from this block's shared memory to the other block's, whose barrier counts the bytes. No
// other signal shows that the source has been read. Multiples of 16 bytes.
__device__ __forceinline__ void CopyToCluster(uint32_t cluster_target, uint32_t source,
                                              uint32_t bytes, uint32_t cluster_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(cluster_target),
      "r"(source), "r"(bytes), "r"(cluster_barrier)
      : "memory");
}

// Arrivals of a warp at a barrier of both blocks: one lane arrives at each. In builds with
// RINGATTN_RACECHECK every lane arrives. Barriers at which the warps of both blocks arrive count 2
// * ArrivalsOf(32).
struct BothBlocks {
  const int lane;
  const uint32_t base;  // of the lane's block: cluster address of its shared memory

  __device__ __forceinline__ BothBlocks(uint32_t shared, int lane_of_warp)
      : lane(lane_of_warp), base(ClusterAddress(shared, lane_of_warp & 1)) {}

  // `offset`: of the barrier from the base. All lanes of the warp have finished with the memory
  // that it guards.
  __device__ __forceinline__ void Release(uint32_t shared, uint32_t offset) const {
    __syncwarp();
    if constexpr (kAllArrive) {
      for (uint32_t rank = 0; rank < kClusterBlocks; ++rank) {
        ArriveCluster(ClusterAddress(shared + offset, rank));
      }
    } else if (lane < kClusterBlocks) {
      ArriveCluster(base + offset);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_CLUSTER_CUH_

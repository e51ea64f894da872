// Synchronisation of shared memory between a producer warp and consumer warps: mbarriers, the bulk
// tensor copy that completes on them, and the position in a ring of stages.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_PIPELINE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_PIPELINE_CUH_

#include <cstdint>

namespace ringattn::worker::cuda::sm90 {

// A barrier is 8 bytes of shared memory, identified by its shared address.
__device__ __forceinline__ void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Call it after the initialisation and before the block's barrier: makes the barriers visible to
// the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Which thread arrives for threads that have finished with the memory that a barrier guards: one
// thread, for all that it has synchronised with. In builds with RINGATTN_RACECHECK each thread
// arrives (MEMORY_ORDER.md, "Reports of racecheck").
#ifdef RINGATTN_RACECHECK
inline constexpr bool kAllArrive = true;
#else
inline constexpr bool kAllArrive = false;
#endif
inline constexpr int ArrivalsOf(int threads) { return kAllArrive ? threads : 1; }
// Arrives for a warp; the barrier counts ArrivalsOf(32) of them.
__device__ __forceinline__ void ArriveWarp(uint32_t barrier, int lane) {
  __syncwarp();
  if (kAllArrive || lane == 0) Arrive(barrier);
}

// Arrives, and makes the phase also wait for `bytes` bytes of copies.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// The same before the phase's last arrival, for additional bytes.
__device__ __forceinline__ void ExpectBytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A position in a ring of kStages buffers with a full and an empty barrier each. Consumers wait for
// parity(); the producer waits for the opposite, so that its first round passes.
template <int kStages>
struct RingPosition {
  uint32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  // Advances by two buffers, for users of every other buffer.
  __device__ __forceinline__ void AdvanceTwo() {
    stage += 2;
    if (stage >= kStages) {
      stage -= kStages;
      phase ^= 1;
    }
  }
};

// The L2 cache policy of a copy (the encodings that createpolicy.fractional returns for all of an
// access).
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000;
inline constexpr uint64_t kEvictLast = 0x14F0000000000000;

// Copies the map's box at (column, head, row, batch) to `target`; elements outside the
// tensor become zero and count as copied.
__device__ __forceinline__ void CopyBox(uint32_t target, const void* map, uint32_t barrier,
                                        int column, int head, int row, int batch, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(batch), "l"(policy)
      : "memory");
}

// The same for `bytes` contiguous bytes; both addresses and the size are multiples of 16.
__device__ __forceinline__ void CopyBytes(uint32_t target, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void PrefetchMap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Call it before the first use of a map in global memory: the copy engine reads maps through a
// cache that may hold older contents of the same address.
__device__ __forceinline__ void AcquireMap(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// Loads a word of shared memory at its shared address.
__device__ __forceinline__ uint32_t LoadShared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Loads a word with acquire order at system scope: writes that another processor made before it are
// visible afterwards.
__device__ __forceinline__ uint32_t LoadAcquired(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// Bulk copies that this thread starts afterwards see global memory as the thread sees it now.
__device__ __forceinline__ void FenceBulkCopies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Moves registers of the calling warpgroup from or to the block's pool. All warps of the warpgroup
// execute it in one branch.
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_PIPELINE_CUH_

// How a producer warp and consumer warps hand over shared memory: mbarriers, the bulk
// tensor copy that completes on them, and the position in a ring of stages.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_PIPELINE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_PIPELINE_CUH_

#include <cstdint>

namespace ringattn::worker::cuda::sm90 {

// Barriers are 8 bytes of shared memory, named by their shared address.
__device__ __forceinline__ void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the initialisation, before the block's barrier: the copy engine sees them too.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Who arrives for threads that have left, or written, what a barrier guards: one for all that it
// has met before. Built with RINGATTN_RACECHECK each for itself (MEMORY_ORDER.md, "Reports of
// racecheck").
#ifdef RINGATTN_RACECHECK
inline constexpr bool kAllArrive = true;
#else
inline constexpr bool kAllArrive = false;
#endif
inline constexpr int ArrivalsOf(int threads) { return kAllArrive ? threads : 1; }
// Its warp's, of which ArrivalsOf(32) are counted.
__device__ __forceinline__ void ArriveWarp(uint32_t barrier, int lane) {
  __syncwarp();
  if (kAllArrive || lane == 0) Arrive(barrier);
}

// Arrives, and the phase also waits for so many bytes of copies.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// The same before the phase's last arrival: for more bytes.
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

// A place in a ring of kStages buffers with a full and an empty barrier each. Consumers
// wait for parity(); the producer for the opposite, so that its first round passes.
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
  // Two buffers on, for who uses every other one.
  __device__ __forceinline__ void AdvanceTwo() {
    stage += 2;
    if (stage >= kStages) {
      stage -= kStages;
      phase ^= 1;
    }
  }
};

// What the L2 cache should do with the lines of a copy (the encodings that
// createpolicy.fractional makes for all of an access).
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

// The same of `bytes` in a row, both addresses and the size multiples of 16.
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
// Before the first use of a map that lies in global memory: the copy engine reads maps
// through a cache that an earlier kernel may have filled from the same address.
__device__ __forceinline__ void AcquireMap(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// A word of shared memory, by its shared address.
__device__ __forceinline__ uint32_t LoadShared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// What another processor of the machine wrote before this word, in the order in which it wrote.
__device__ __forceinline__ uint32_t LoadAcquired(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// Bulk copies that this thread starts read global memory as it is to the thread by now.
__device__ __forceinline__ void FenceBulkCopies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Moves registers of the calling warpgroup from or to the block's pool. All its warps
// execute it, in one branch.
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

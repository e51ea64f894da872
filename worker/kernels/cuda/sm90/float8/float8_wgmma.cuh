// Warpgroup products of e4m3 (see wgmma.cuh for descriptors and accumulators).
//
// Both operands are read along their rows: a tile's row is 128 bytes, one panel, and a k32 step is
// 32 bytes further. The A fragment of a k32 step is four registers. Lane 4 g + q of a warp holds of
// rows g and g + 8 the bytes 4 q .. 4 q + 3 (registers 0 and 1) and 16 + 4 q .. 16 + 4 q + 3 (2 and
// 3).
//
// With a different order of the keys, accumulators are A fragments in the same registers: of each
// 16 keys, lane q holds keys 2 q, 2 q + 1, 8 + 2 q and 9 + 2 q, as bytes 4 q .. 4 q + 3. Values
// have the same order (float8_rounding.cu): byte 4 q + 2 b + i of 16 is key 8 b + 2 q + i.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_WGMMA_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_WGMMA_CUH_

#include "worker/kernels/cuda/sm90/float8/float8_scale.cuh"
#include "worker/kernels/cuda/sm90/primitives/wgmma.cuh"

namespace ringattn::worker::cuda::sm90 {

// d[64 x n] (+)= A B, kCount = n / 2 accumulators, A and B in shared memory; with accumulate = 0, d
// is overwritten. p0 .. p2 are the numbers of the operands after the accumulators.
#define RINGATTN_QGMMA_SHARED(n, count, p0, p1, p2)                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p2                                         \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" RINGATTN_S##count \
               "}, " p0 ", " p1 ", p, 1, 1;\n}\n"                                             \
               : RINGATTN_D##count(d)                                                         \
               : "l"(a), "l"(b), "r"(accumulate))

// The same with A in registers.
#define RINGATTN_QGMMA_REGISTERS(n, count, p0, p1, p2, p3, p4, p5)                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p5                                         \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" RINGATTN_S##count \
               "}, {" p0 "," p1 "," p2 "," p3 "}, " p4 ", p, 1, 1;\n}\n"                      \
               : RINGATTN_D##count(d)                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

template <int kCount>
__device__ __forceinline__ void MultiplyFloat8Shared(float (&d)[kCount], uint32_t a_descriptor,
                                                     uint32_t b_descriptor, int accumulate) {
  const uint64_t a = WholeDescriptor(a_descriptor);
  const uint64_t b = WholeDescriptor(b_descriptor);
  static_assert(kCount == 64, "no product of this width");
  RINGATTN_QGMMA_SHARED(128, 64, "%64", "%65", "%66");
}

template <int kCount>
__device__ __forceinline__ void MultiplyFloat8Registers(float (&d)[kCount], const uint32_t* a,
                                                        uint32_t b_descriptor, int accumulate) {
  const uint64_t b = WholeDescriptor(b_descriptor);
  if constexpr (kCount == 32) {
    RINGATTN_QGMMA_REGISTERS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37");
  } else {
    static_assert(kCount == 64, "no product of this width");
    RINGATTN_QGMMA_REGISTERS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69");
  }
}

#undef RINGATTN_QGMMA_SHARED
#undef RINGATTN_QGMMA_REGISTERS

// The A fragments of kCount / 8 x 16 keys.
template <int kCount>
__device__ __forceinline__ void PackFloat8Probabilities(const float (&scores)[kCount],
                                                        uint32_t (&p)[kCount / 4]) {
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const s = scores + i * 8 + half * 2;
      p[i * 2 + half] = PackFloat8(s[0], s[1], s[4], s[5]);
    }
  }
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_WGMMA_CUH_

// Warpgroup products of e4m3 (see wgmma.cuh for descriptors and accumulators).
//
// Both operands are read along their rows: a tile's row is 128 bytes, one panel, and a k32 step is
// 32 bytes on. The A fragment of a k32 step is four registers: lane 4 g + q of a warp has of rows g
// and g + 8 the columns 4 q .. 4 q + 3 (registers 0 and 1) and 16 + 4 q .. 16 + 4 q + 3 (2 and 3).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_WGMMA_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_WGMMA_CUH_

#include "worker/kernels/cuda/sm90/float8_scale.cuh"
#include "worker/kernels/cuda/sm90/wgmma.cuh"

namespace ringattn::worker::cuda::sm90 {

// d[64 x 128] (+)= A B, A and B in shared memory; with accumulate = 0 d is only written.
__device__ __forceinline__ void MultiplyFloat8Shared(float (&d)[64], uint32_t a_descriptor,
                                                     uint32_t b_descriptor, int accumulate) {
  const uint64_t a = WholeDescriptor(a_descriptor);
  const uint64_t b = WholeDescriptor(b_descriptor);
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" RINGATTN_S64
      "}, %64, %65, p, 1, 1;\n}\n"
      : RINGATTN_D64(d)
      : "l"(a), "l"(b), "r"(accumulate));
}

// The same with A in registers.
__device__ __forceinline__ void MultiplyFloat8Registers(float (&d)[64], const uint32_t* a,
                                                        uint32_t b_descriptor, int accumulate) {
  const uint64_t b = WholeDescriptor(b_descriptor);
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" RINGATTN_S64
      "}, {%64,%65,%66,%67}, %68, p, 1, 1;\n}\n"
      : RINGATTN_D64(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// Accumulators become A fragments. Of 32 columns lane q of a quad has 8 n + 2 q and the next for n
// = 0 .. 3, and wants 4 q .. 4 q + 3 of each half: the pair of block q / 2 of the half, of lanes
// 2 (q % 2) and the next. Each lane sends in two rounds what one of the two lanes that want
// something of it asks for: in the first, even lanes send blocks 0 and 2, odd ones 1 and 3, and
// lane q listens to lane 2 (q % 2) + q / 2; in the second, the others.
struct Float8Fragments {
  int first;         // lane of the warp that is listened to in the first round
  uint32_t send;     // byte permutations: what is sent first,
  uint32_t receive;  // and how the two words become the fragment of the lower half
  static constexpr uint32_t kOther = 0x2222;

  __device__ __forceinline__ explicit Float8Fragments(int lane) {
    const int q = lane & 3;
    first = (lane & ~3) | (q & 1) << 1 | q >> 1;
    send = q & 1 ? 0x7632 : 0x5410;
    receive = q & 2 ? 0x1054 : 0x5410;
  }

  __device__ __forceinline__ void Pack(const float (&scores)[64], uint32_t (&p)[16]) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* s = scores + step * 16 + half * 2;
        const uint32_t low = PackFloat8(s[0], s[1]) | PackFloat8(s[4], s[5]) << 16;
        const uint32_t high = PackFloat8(s[8], s[9]) | PackFloat8(s[12], s[13]) << 16;
        const uint32_t a = __shfl_sync(0xffffffff, __byte_perm(low, high, send), first);
        const uint32_t b =
            __shfl_sync(0xffffffff, __byte_perm(low, high, send ^ kOther), first ^ 1);
        p[step * 4 + half] = __byte_perm(a, b, receive);
        p[step * 4 + 2 + half] = __byte_perm(a, b, receive ^ kOther);
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_WGMMA_CUH_

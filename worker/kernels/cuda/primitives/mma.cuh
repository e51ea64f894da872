// Tensor-core fragments: ldmatrix, stmatrix, mma.sync m16n8k16.
//
// ldmatrix positions, as Offset(row, chunk) of a lane, for one 16 x 16 group:
//   A row-major, and B whose rows are the product's inner axis (transposed load):
//     (lane % 16, lane / 16)
//   B row-major in its columns (k of q k^T), and A stored transposed (transposed load):
//     (lane % 8 + 8 (lane / 16), lane / 8 % 2)
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_MMA_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_MMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ringattn::worker::cuda {

__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Stores four 8 x 8 matrices at the addresses from which LoadMatrices reads their rows: r[0] holds
// rows 0 to 7, r[1] rows 8 to 15, and r[2] and r[3] the same rows of the next 8 columns.
__device__ __forceinline__ void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#else
  // Lane l holds row l / 4 of each matrix; lane 8 i + l / 4 holds the address of that row.
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = __shfl_sync(0xffffffff, address, i * 8 + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(r[i]) : "memory");
  }
#endif
}

// d[16x8] += a[16x16] b[16x8], fp32 accumulation; with kFresh d is overwritten.
template <typename T, bool kFresh = false>
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
#define RINGATTN_MMA(type)                                                                   \
  if constexpr (kFresh) {                                                                    \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                      \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"            \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f)); \
  } else {                                                                                   \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                      \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));            \
  }
  if constexpr (sizeof(T) == 2 && __is_same(T, __half)) {
    RINGATTN_MMA("f16")
  } else {
    RINGATTN_MMA("bf16")
  }
#undef RINGATTN_MMA
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_MMA_CUH_

// The four lanes that share a row of accumulators exchange their pairs of columns, so that each
// lane holds 16 contiguous bytes.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_QUAD_TRANSPOSE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_QUAD_TRANSPOSE_CUH_

#include <cstdint>

namespace ringattn::worker::cuda::sm90 {

// Lane q of a quad has w[j] for every j and receives w[q] of every lane: a 4 x 4 transposition in
// two rounds. All lanes of the warp take part.
__device__ __forceinline__ void TransposeQuad(uint32_t (&w)[4], int q) {
  const bool odd = q & 1;
  const uint32_t a = __shfl_xor_sync(0xffffffff, odd ? w[0] : w[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffff, odd ? w[2] : w[3], 1);
  // Even lanes have rows 0 and 2 of lanes q, q + 1; odd lanes rows 1 and 3 of q - 1, q.
  const uint32_t x0 = odd ? a : w[0], x1 = odd ? w[1] : a;
  const uint32_t y0 = odd ? b : w[2], y1 = odd ? w[3] : b;
  const bool high = q & 2;
  const uint32_t c = __shfl_xor_sync(0xffffffff, high ? x0 : y0, 2);
  const uint32_t d = __shfl_xor_sync(0xffffffff, high ? x1 : y1, 2);
  w[0] = high ? c : x0;
  w[1] = high ? d : x1;
  w[2] = high ? y0 : c;
  w[3] = high ? y1 : d;
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_PRIMITIVES_QUAD_TRANSPOSE_CUH_

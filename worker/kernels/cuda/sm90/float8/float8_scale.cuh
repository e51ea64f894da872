// e4m3 on the device: the power-of-two scale of a tensor (worker/kernels/e4m3.h), and conversions.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_SCALE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_SCALE_CUH_

#include <cstdint>

namespace ringattn::worker::cuda::sm90 {

// Returns ScaleExponent of e4m3.h from the bits of a magnitude: 448 is 1.75 * 2^8.
__device__ __forceinline__ int Float8Exponent(uint32_t largest) {
  if (largest == 0) return 0;
  const int exponent =
      static_cast<int>(largest >> 23) - 127 - 8 + ((largest & 0x7fffffu) > 0x600000u);
  return max(exponent, -100);
}

// Returns 2^exponent, within fp32's normal numbers.
__device__ __forceinline__ float PowerOfTwo(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// Packs four values rounded to nearest even, the first in the lowest byte. Values beyond 448
// saturate; NaN stays NaN.
__device__ __forceinline__ uint32_t PackFloat8(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// Returns NaN for an infinity, which e4m3 would convert to 448.
__device__ __forceinline__ float NanUnlessFinite(float x) {
  return fabsf(x) <= 3.402823466e38f ? x : __int_as_float(0x7fffffff);
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_SCALE_CUH_

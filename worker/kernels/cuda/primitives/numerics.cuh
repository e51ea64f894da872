// Numbers in kernels: constants, exponentials, conversions between fp32 and the 16-bit types.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_NUMERICS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_NUMERICS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ringattn::worker::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh to about 2e-7 of its value below 0.2, where 1 - 2 / (1 + exp 2x) would
// cancel, and 2e-7 absolute above. tanh.approx (2^-11) would move lse by up to
// 1e-2 at a cap of 30.
__device__ __forceinline__ float Tanh(float x) {
  const float e = Exp2(x * (2.0f * kLog2E));
  const float large = 1.0f - __fdividef(2.0f, 1.0f + fminf(e, 1e30f));
  const float x2 = x * x;
  float series = fmaf(x2, -17.0f / 315.0f, 2.0f / 15.0f);
  series = fmaf(x2, series, -1.0f / 3.0f);
  series = fmaf(x2 * x, series, x);
  return fabsf(x) < 0.2f ? series : large;
}

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

// Two floats rounded into one register, `low` in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t Pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ __forceinline__ uint32_t Pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Unpacks one register to two floats.
template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t packed);
template <>
__device__ __forceinline__ float2 Unpack<__nv_bfloat16>(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 Unpack<__half>(uint32_t packed) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PRIMITIVES_NUMERICS_CUH_

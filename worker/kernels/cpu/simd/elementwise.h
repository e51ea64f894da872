// Vectorised passes over rows: conversions, sums, dot products.
#ifndef RINGATTN_WORKER_KERNELS_CPU_SIMD_ELEMENTWISE_H_
#define RINGATTN_WORKER_KERNELS_CPU_SIMD_ELEMENTWISE_H_

#include <cstdint>

#include "common/attention/dtype.h"
#include "worker/kernels/cpu/simd/tile_ops.h"

namespace ringattn::worker::cpu {

// All pointers are host memory; none overlap unless a comment allows it.

// target[i] = source[i] rounded to nearest even. fp32: may be the same memory.
void Convert(DType dtype, const float* source, void* target, int64_t count);

// target[i] = target[i] + factor * source[i].
void AddScaled(float factor, const float* source, float* target, int64_t count);

// Sum of a[i] * b[i] over `count` elements of `dtype`, in fp32.
float Dot(DType dtype, const void* a, const void* b, int64_t count);

// The largest |element|: infinite or NaN if any element is.
float MaxMagnitude(const SourceRows& source);

// target[i] = first_weight * first[i] + second_weight * second[i]. Target may be
// `first` or `second`.
void Combine(float first_weight, const float* first, float second_weight, const float* second,
             float* target, int64_t count);

// target[i] = weight * source[i]. Target may be source.
void Scale(float weight, const float* source, float* target, int64_t count);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_SIMD_ELEMENTWISE_H_

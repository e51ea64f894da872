// Scalar number formats for the oracle: written apart from common/attention/dtype.h, so
// that an error there cannot hide behind the judge. Simple rather than fast.
#ifndef RINGATTN_COMMON_ORACLE_NUMERIC_H_
#define RINGATTN_COMMON_ORACLE_NUMERIC_H_

#include <cstdint>

#include "common/attention/dtype.h"

namespace ringattn::oracle {

// The value of element `index` of an array of `dtype` in host memory.
double Load(DType dtype, const void* data, int64_t index);

// Elements [first, first + count) into target[0, count).
void LoadMany(DType dtype, const void* data, int64_t first, int64_t count, double* target);

// Rounds `value` to nearest even and stores it as element `index`. Overflow is
// ±inf, NaN stays NaN.
void Store(DType dtype, void* data, int64_t index, double value);

// The nearest value of `dtype` (ties to even), as a double: what Store followed
// by Load gives.
double RoundTo(DType dtype, double value);

// The same of e4m3: beyond 448 infinite, which it has not.
double RoundToE4m3(double value);

int64_t BytesOf(DType dtype);

// The u of the element rule: 2^-9 bf16, 2^-12 fp16, 2^-20 fp32.
double ToleranceUnit(DType dtype);

// What storing a term of `value` in the dtype may lose beyond relative rounding: half
// the smallest subnormal of fp16 where that is its spacing; 0 for 0, which kernels have
// exactly (masked pairs), and for bf16 and fp32 (see Float32Flush).
double SubnormalLoss(DType dtype, double value);

// The same for a result: a flat 2^-25 below 2^-14 in fp16, at 0 too, where what a kernel
// stores is a sum that need not cancel exactly.
double ResultLoss(DType dtype, double value);

// What fp32 arithmetic may lose of `value` to underflow: all of it below 2^-120,
// because exponentials of the kind that kernels use underflow a little before
// 2^-126, and at least 2^-126 there. 0 for 0.
double Float32Flush(double value);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_NUMERIC_H_

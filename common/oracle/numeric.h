// Scalar number formats of the oracle. Independent of common/attention/dtype.h, so that the oracle
// does not share an error there. Simple rather than fast.
#ifndef RINGATTN_COMMON_ORACLE_NUMERIC_H_
#define RINGATTN_COMMON_ORACLE_NUMERIC_H_

#include <cstdint>

#include "common/attention/dtype.h"

namespace ringattn::oracle {

// Returns the value of element `index` of an array of `dtype` in host memory.
double Load(DType dtype, const void* data, int64_t index);

// Loads elements [first, first + count) into target[0, count).
void LoadMany(DType dtype, const void* data, int64_t first, int64_t count, double* target);

// Rounds `value` to nearest even and stores it as element `index`. Overflow gives ±inf; NaN stays
// NaN.
void Store(DType dtype, void* data, int64_t index, double value);

// Returns the nearest value of `dtype` (ties to even) as a double: the result of Store followed by
// Load.
double RoundTo(DType dtype, double value);

// The same for e4m3. Beyond 448 it returns an infinity, although e4m3 has none.
double RoundToE4m3(double value);

int64_t BytesOf(DType dtype);

// Returns the u of the element rule: 2^-9 bf16, 2^-12 fp16, 2^-20 fp32.
double ToleranceUnit(DType dtype);

// Returns what storing a term of `value` in the dtype may lose beyond relative rounding: half the
// smallest subnormal of fp16 if that is its spacing. Returns 0 for 0, which kernels represent
// exactly (masked pairs), and for bf16 and fp32 (see Float32Flush).
double SubnormalLoss(DType dtype, double value);

// The same for a result: 2^-25 below 2^-14 in fp16, also for 0, because a kernel stores a sum that
// need not cancel exactly.
double ResultLoss(DType dtype, double value);

// Returns what fp32 arithmetic may lose of `value` to underflow: all of it below 2^-120, because
// exponentials of the kind that kernels use underflow slightly before 2^-126, and at least 2^-126
// there. Returns 0 for 0.
double Float32Flush(double value);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_NUMERIC_H_

// Element types of the tensors that the service computes on.
//
// q, k, v, out, dout, dq, dk and dv of one request share one DType. lse and every other statistic
// or accumulator is always fp32.
#ifndef RINGATTN_COMMON_ATTENTION_DTYPE_H_
#define RINGATTN_COMMON_ATTENTION_DTYPE_H_

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace ringattn {

enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Returns the bytes of one element.
int64_t ElementBytes(DType dtype);

// "fp32", "bf16", "fp16": the names in flags, logs and JSON.
absl::string_view DTypeName(DType dtype);
std::optional<DType> DTypeFromName(absl::string_view name);

// Scalar conversions with round to nearest even. NaN stays NaN; overflow gives ±inf.
float BFloat16ToFloat(uint16_t bits);
uint16_t FloatToBFloat16(float value);
float Float16ToFloat(uint16_t bits);
uint16_t FloatToFloat16(float value);

// Converts `count` elements between `dtype` and fp32. Both arrays are in host memory and must not
// overlap.
void ConvertToFloat(DType dtype, const void* source, float* target, int64_t count);
void ConvertFromFloat(DType dtype, const float* source, void* target, int64_t count);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_DTYPE_H_

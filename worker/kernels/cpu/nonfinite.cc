#include "worker/kernels/cpu/nonfinite.h"

#include "worker/kernels/cpu/simd/elementwise.h"

namespace ringattn::worker::cpu {

float PackedElement(const TileOps& ops, const float* words, int64_t index) {
  if (ops.elements_per_word == 1) return words[index];
  float value;
  ConvertToFloat(DType::kBFloat16, reinterpret_cast<const char*>(words) + 2 * index, &value, 1);
  return value;
}

void LoadRow(const SourceRows& source, int row, float* target) {
  const char* elements =
      static_cast<const char*>(source.data) + source.RowOffset(row) * ElementBytes(source.dtype);
  ConvertToFloat(source.dtype, elements, target, source.cols);
}

void AddWeightedRow(const SourceRows& source, int row, float weight, float* converted,
                    float* target) {
  LoadRow(source, row, converted);
  AddScaled(weight, converted, target, source.cols);
}

}  // namespace ringattn::worker::cpu

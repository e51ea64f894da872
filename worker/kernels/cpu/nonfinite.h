// Element by element steps for tiles in which masked rows or keys hold NaN or
// infinity: there a weight of 0 does not silence its operand, so masked elements
// must not be touched at all.
#ifndef RINGATTN_WORKER_KERNELS_CPU_NONFINITE_H_
#define RINGATTN_WORKER_KERNELS_CPU_NONFINITE_H_

#include <cstdint>

#include "worker/kernels/cpu/simd/tile_ops.h"

namespace ringattn::worker::cpu {

// Element `index` of consecutive packed words.
float PackedElement(const TileOps& ops, const float* words, int64_t index);

// Row `row` of source as floats: target[0, cols).
void LoadRow(const SourceRows& source, int row, float* target);

// target[0, cols) += weight * row `row` of source. converted: cols floats of scratch.
void AddWeightedRow(const SourceRows& source, int row, float weight, float* converted,
                    float* target);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_NONFINITE_H_

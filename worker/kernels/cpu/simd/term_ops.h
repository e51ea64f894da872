// The SIMD leaves of the score terms, chosen at run time (score_terms.h describes their use). Rows
// of `count` columns; nothing is read or written beyond them unless a comment allows it.
#ifndef RINGATTN_WORKER_KERNELS_CPU_SIMD_TERM_OPS_H_
#define RINGATTN_WORKER_KERNELS_CPU_SIMD_TERM_OPS_H_

#include <cstdint>

#include "common/attention/dtype.h"
#include "worker/kernels/cpu/simd/tile_ops.h"
#include "worker/kernels/philox.h"

namespace ringattn::worker::cpu {

// target[c] = source[c].
void LoadBias(DType dtype, const void* source, int count, float* target);

// target[c] -= slope * |distance - c|, rounded once.
void SubtractDistance(float slope, int64_t distance, int count, float* target);

// target[c] = -inf where the mask is 0: bytes, or bits from bit `first` on, lowest first.
void MaskByBytes(const uint8_t* mask, int count, float* target);
void MaskByBits(const uint8_t* mask, int64_t first, int count, float* target);

// target[c] = -inf where ids[c] is not id, or id is negative.
void MaskByIds(int32_t id, const int32_t* ids, int count, float* target);

// Products q.k become scores in natural units:
//   s = scale * q.k + inside, or cap * tanh of it / cap
//   s += add, but -inf where add is -inf
//   s -= slope * |distance - c|
struct FinishArgs {
  int count = 0;       // multiple of 16: garbage in, garbage out
  float scale = 0.0f;  // |softmax scale|
  float cap = 0.0f;    // 0 = off
  float slope = 0.0f;  // 0 = off
  int64_t distance = 0;
  const float* add = nullptr;     // [count], or null
  const float* inside = nullptr;  // [count], or null
  float* scores = nullptr;        // in: q.k
  float* slopes = nullptr;        // [count]: d score / d (scale * q.k); null: not requested
};
void FinishScores(const FinishArgs& args);

// words[w] = KeepWord(row, first + w).
void KeepWords(const PhiloxRow& row, uint32_t first, uint32_t threshold, int count,
               uint32_t* words);

// target[c] = bit first + c of words ? scale : 0, where one word more may be read than has bits.
void ExpandKeepBits(const uint32_t* words, int first, float scale, int count, float* target);

// ds[r][c] = ds of finished scores (GradientArgs with `terms`), a row every args.stride; may be
// args.dp. Writes those vectors of each row that hold a visible column.
void ScoreGradients(const GradientArgs& args, float* ds);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_SIMD_TERM_OPS_H_

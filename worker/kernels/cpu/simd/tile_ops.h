// TileOps: the SIMD leaves of the CPU kernels, chosen at run time.
//
// Forward and backward are products of small tiles. Their operands are packed
// into 32-bit *words* along the reduction axis: one fp32 value per word, or two
// consecutive bf16 values where the processor multiplies bf16 pairs. Words are
// stored in float arrays for every dtype; only a TileOps reads them.
//
//   left operand   word (row, depth) at row * row_stride + depth, or, when
//                  `left_transposed`, at depth * row_stride + row
//   right operand  column panels of `panel` words: word (depth, column) at
//                  panel_index * panel * depth_words + depth * pitch + column_in_panel
//                  where pitch is `panel`, in the last panel what remains.
//                  Columns are padded with zeros to a multiple of `lanes`.
#ifndef RINGATTN_WORKER_KERNELS_CPU_SIMD_TILE_OPS_H_
#define RINGATTN_WORKER_KERNELS_CPU_SIMD_TILE_OPS_H_

#include <cmath>
#include <cstdint>

#include "common/attention/dtype.h"

namespace ringattn::worker::cpu {

// A matrix of the problem in memory: `rows` x `cols` elements of `dtype`.
struct SourceRows {
  DType dtype = DType::kFloat32;
  const void* data = nullptr;
  int64_t row_stride = 0;  // elements
  int rows = 0;
  int cols = 0;
  // If not 0, rows come in groups of this many, row_stride apart inside a group
  // and group_stride from group to group: the heads of tokens.
  int group_rows = 0;
  int64_t group_stride = 0;

  int64_t RowOffset(int row) const {
    if (group_rows == 0) return row * row_stride;
    return row / group_rows * group_stride + row % group_rows * row_stride;
  }
};

// c = left * right, or c = row_scale * c + left * right when `accumulate`.
struct GemmArgs {
  int rows = 0;
  int col_begin = 0;  // multiple of panel
  int col_end = 0;    // multiple of lanes
  int depth_begin = 0;
  int depth_end = 0;  // words
  const float* left = nullptr;
  int64_t left_stride = 0;  // words
  bool left_transposed = false;
  const float* right = nullptr;
  int right_cols = 0;   // padded columns of the whole right operand
  int right_depth = 0;  // words of each panel's columns
  float* c = nullptr;   // row 0, column 0
  int64_t c_stride = 0;
  bool accumulate = false;
  const float* row_scale = nullptr;  // per row, null = 1
};

// How products q.k become scores: score = natural * q.k, or, with a softcap,
// natural * tanh(inside_cap * q.k); to_log2 is natural in units of log2.
struct ScoreScale {
  float natural = 0.0f;     // softmax_scale or softcap
  float to_log2 = 0.0f;     // natural * log2(e)
  float inside_cap = 0.0f;  // softmax_scale / softcap, 0 = no softcap
};

// Scores of this size, in natural units or in units of log2, are wide: fp32 holds them in
// steps of 2^-6 and more, so what rounds must round alike wherever it is to cancel. Below,
// roundings differ by less than 1% of a weight, and kernels keep their quickest form.
inline constexpr float kWideScore = 131072.0f;
inline bool IsWide(float score) { return !(std::abs(score) < kWideScore); }

// One step of the online softmax over columns [col_begin, col_end) of a score
// tile. Row r sees the columns [visible_begin[r], visible_end[r]); the others
// get weight 0 and are otherwise ignored. Updates row_max, the largest q.k (or
// tanh) so far, and row_sum, the sum of 2^(to_log2 * q.k - fl(to_log2 * row_max)), or, where
// that product is wide, of 2^(to_log2 * (q.k - row_max));
// correction[r] is the factor for what was accumulated before.
struct SoftmaxArgs {
  int rows = 0;
  int col_begin = 0;  // multiples of lanes
  int col_end = 0;
  ScoreScale scale;
  const int32_t* visible_begin = nullptr;
  const int32_t* visible_end = nullptr;
  float* scores = nullptr;  // in: q.k. Overwritten.
  int64_t scores_stride = 0;
  float* weights = nullptr;  // out: words, row-major. May be `scores` when a word is one value.
  int64_t weights_stride = 0;
  float* row_max = nullptr;
  float* row_sum = nullptr;
  float* correction = nullptr;
  // Factors of the weights (dropout), which the sum does not have: a row every scores_stride.
  // Null: 1.
  const float* keeps = nullptr;
};

// p = exp(score - lse), at most 1 where lse is wide, and ds = p * (dp - delta) * d(score)/d(q.k)
// without the softmax scale; 0 outside a row's visible columns.
// With `terms`, scores are finished ones (score_pass.h): -inf is hidden, and has p and ds of 0;
// ds = p * (keep * dp - delta) * slope, and the p that goes into dv is keep * p.
struct GradientArgs {
  int rows = 0;
  int col_begin = 0;  // multiples of lanes
  int col_end = 0;
  ScoreScale scale;
  const int32_t* visible_begin = nullptr;
  const int32_t* visible_end = nullptr;
  const float* lse = nullptr;     // per row
  const float* delta = nullptr;   // per row
  const float* scores = nullptr;  // q.k
  const float* dp = nullptr;      // dout.v
  int64_t stride = 0;             // of scores, dp, slopes, keeps and all outputs but ds_rows
  bool terms = false;
  const float* slopes = nullptr;  // null: 1
  const float* keeps = nullptr;   // null: 1
  // Outputs: words along the rows (for transposed left operands), and ds_rows:
  // words along the columns. When a word is one value p may be `scores`, and ds
  // and ds_rows are both `dp`.
  float* p = nullptr;
  float* ds = nullptr;
  float* ds_rows = nullptr;
  int64_t ds_rows_stride = 0;
  // With `terms`: ds unrounded, where a word is not one value; may be `dp`. Null if it is not
  // requested.
  float* exact_ds = nullptr;
};

struct TileOps {
  const char* name;       // of the instruction set: "AVX3", "AVX512_BF16"
  int elements_per_word;  // 1 or 2
  int lanes;              // words of one vector
  int panel;              // words of one panel row, a multiple of lanes

  // Left operand from rows: word-packed along cols, zero padded, optionally
  // negated. target row r at r * target_stride words.
  void (*pack_left)(const SourceRows& source, bool negate, float* target, int64_t target_stride);

  // Right operand whose depth is source's columns and whose columns are source's
  // rows. `scratch`: rows * cols words, used when the dtype needs conversion.
  // REQUIRES: source.group_rows == 0.
  void (*pack_right_transposed)(const SourceRows& source, float* target, float* scratch);

  // Right operand whose depth is source's rows and whose columns are source's
  // columns. Returns true if any element is NaN or infinite.
  bool (*pack_right)(const SourceRows& source, float* target);

  void (*gemm)(const GemmArgs& args);
  void (*softmax)(const SoftmaxArgs& args);
  void (*gradient)(const GradientArgs& args);

  int PadColumns(int cols) const { return (cols + lanes - 1) / lanes * lanes; }
  int Words(int elements) const { return (elements + elements_per_word - 1) / elements_per_word; }
};

// The fastest TileOps that this processor has for tensors of `dtype`.
const TileOps& TileOpsFor(DType dtype);

// bf16 pairs on AVX-512 BF16; null where the processor lacks it.
const TileOps* Avx512Bf16TileOps();

// fp32 arithmetic for any dtype.
const TileOps& Float32TileOps();

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_SIMD_TILE_OPS_H_

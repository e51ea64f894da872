// A forward in e4m3 (AttentionOptions::compute_dtype), as the oracle sees it.
//
// Scales are powers of two, and which one a worker took depends on the rows that it had: it moves
// nothing but what e4m3 has no normal number for. The oracle rounds by the largest scale that there
// can be, of all rows of a batch row and head, and grants what a smaller one does to these values.
#ifndef RINGATTN_COMMON_ORACLE_FLOAT8_H_
#define RINGATTN_COMMON_ORACLE_FLOAT8_H_

#include <cstdint>
#include <vector>

#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// A tensor core adds the products of 32 columns with 13 fraction bits below the largest of them
// (Hopper; nothing says so but measurements), so that a score may lose about 2^-10 of its S.
inline constexpr double kFloat8ScoreSlack = 0x1p-10;
// From an error of scores of this size on, what p may become is bounded as in wide rows.
inline constexpr double kFloat8CoarseError = 0x1p-6;
// The u of the element rule: 8 u is twice the 2^-4 that rounding p costs, for sums of few bits.
inline constexpr double kFloat8Unit = 0x1p-6;
// p below 2^-14 of the row's largest is no normal number any more, and off by 2^-18 of that.
inline constexpr double kFloat8WeightLoss = 0x1p-18;

inline bool IsFloat8(const AttentionSpec& spec) {
  return spec.options.compute_dtype == ComputeDType::kFloat8E4M3;
}

// What |x| <= 2^-6 scale may be off by: half a step by this scale and half by another.
inline double Float8TinyLoss(double scale) { return 0x1p-9 * scale; }

// The power of two that a tensor is rounded relative to, by batch row and kv head.
class Float8Scales {
 public:
  // Reads q, k and v of problems in e4m3; else every scale is 0, none.
  Float8Scales(const AttentionSpec& spec, const Inputs& inputs);

  //   tensor  kQ, kK or kV
  double Of(TensorId tensor, int64_t batch, int64_t kv_head) const;

 private:
  int64_t batch_;
  int64_t kv_heads_;
  std::vector<double> scales_;  // [tensor][batch][kv_head]; empty: none
};

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_FLOAT8_H_

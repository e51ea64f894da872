// The oracle's model of a forward in e4m3 (AttentionOptions::compute_dtype).
//
// Scales are powers of two. A worker's scale depends on the rows that it has, which affects only
// values without a normal e4m3 number. The oracle rounds by the largest possible scale (that of all
// rows of a batch row and head) and permits the errors of smaller scales.
#ifndef RINGATTN_COMMON_ORACLE_FLOAT8_H_
#define RINGATTN_COMMON_ORACLE_FLOAT8_H_

#include <cstdint>
#include <vector>

#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// A tensor core adds the products of 32 columns with 13 fraction bits below the largest of them
// (measured on Hopper; not documented). So a score may lose about 2^-10 of its S.
inline constexpr double kFloat8ScoreSlack = 0x1p-10;
// From this error of a score on, p is bounded as in wide rows.
inline constexpr double kFloat8CoarseError = 0x1p-6;
// The u of the element rule. 8 u is twice the 2^-4 that rounding p costs, for sums of few bits.
inline constexpr double kFloat8Unit = 0x1p-6;
// p below 2^-14 of the row's largest has no normal number; its error is up to 2^-18 of the largest.
inline constexpr double kFloat8WeightLoss = 0x1p-18;

inline bool IsFloat8(const AttentionSpec& spec) {
  return spec.options.compute_dtype == ComputeDType::kFloat8E4M3;
}

// Returns the maximum error of a value with |x| <= 2^-6 scale: half a step by this scale and half a
// step by another.
inline double Float8TinyLoss(double scale) { return 0x1p-9 * scale; }

// The power-of-two scale of a tensor, by batch row and kv head.
class Float8Scales {
 public:
  // Reads q, k and v if the spec computes in e4m3; otherwise every scale is 0 (none).
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

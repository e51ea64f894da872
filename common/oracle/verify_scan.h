// Scan: checks every row of an output for impossible values without computing attention: NaN, rows
// of zeros, values beyond cheap bounds. An accused row is a suspect; Verify then computes it in
// fp64 like its samples.
//
// A row that sees keys (for dk and dv: that queries see) is suspect for
//   all      an element that is not finite; a row of zeros whose inputs are not zero
//   out      an element outside [min, max] of that column of v over the visible keys
//   lse      outside ln n -+ S, n the visible keys, S >= |scores| by Cauchy-Schwarz
//   dq       |dq| > 2 |scale| |dout| max|v| max|k|
//   dk       |dk| > 2 |scale| max|v| sum |dout||q|
//   dv       |dv| > sum |dout|
// (Maxima are over the visible keys, sums over the queries. Blocks of kScanBlock tokens count as a
// whole. |.| is a row's 2-norm. 1% is added for rounding.) A row that sees nothing must be zero and
// its lse -inf. With score terms (bias, masks by pair, ALiBi, dropout) or dilation none of these
// bounds holds, and only NaN elements are suspect.
#ifndef RINGATTN_COMMON_ORACLE_VERIFY_SCAN_H_
#define RINGATTN_COMMON_ORACLE_VERIFY_SCAN_H_

#include <cstdint>
#include <map>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/oracle/comparator.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// Tokens per entry of the tables of extremes. With 256, the tables of 1M tokens of 128 columns take
// 50 MB for each head that is being scanned.
inline constexpr int64_t kScanBlock = 256;

struct Suspects {
  int64_t found = 0;
  std::vector<RowId> rows;  // at most `limit` of the rows found, spread over them
};

// Returns the suspects of every tensor in `actual`; gradients need inputs.dout. Takes about two
// nanoseconds of processor time per element of inputs and outputs, on all processors. Pure.
std::map<TensorId, Suspects> Scan(const AttentionSpec& spec, const Inputs& inputs,
                                  const Outputs& actual, int64_t limit);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_VERIFY_SCAN_H_

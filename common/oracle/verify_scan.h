// Scan: looks at every row of an output for what cannot be right, without computing
// attention: NaN, rows of zeros, values beyond cheap bounds. It accuses, it does not
// judge: an accused row is a suspect, which Verify computes in fp64 like its samples.
//
// Of a row that sees keys (or, of dk and dv, that queries see) it is suspect
//   all      an element that is not finite; a row of zeros where what goes into it is not
//   out      an element outside [min, max] of that column of v over the keys seen
//   lse      outside ln n -+ S, n the keys seen, S >= |scores| by Cauchy-Schwarz
//   dq       |dq| > 2 |scale| |dout| max|v| max|k|
//   dk       |dk| > 2 |scale| max|v| sum |dout||q|
//   dv       |dv| > sum |dout|
// (maxima over the keys seen, sums over the queries; blocks of kScanBlock tokens count as
// a whole; |.| is a row's 2-norm; 1% is granted for rounding). A row that sees nothing
// must be zeros, its lse -inf. With score terms (bias, masks by pair, ALiBi, dropout) and dilation
// none of these bounds holds: there an element that is NaN is suspect, and no other.
#ifndef RINGATTN_COMMON_ORACLE_VERIFY_SCAN_H_
#define RINGATTN_COMMON_ORACLE_VERIFY_SCAN_H_

#include <cstdint>
#include <map>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/oracle/comparator.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// Tokens whose extremes are kept together: the tables of 1M tokens of 128 columns take
// 50 MB with 256, for each head that is scanned just then.
inline constexpr int64_t kScanBlock = 256;

struct Suspects {
  int64_t found = 0;
  std::vector<RowId> rows;  // of those found, spread over them, at most the limit
};

// The suspects of every tensor in `actual`; the gradients' need inputs.dout. Takes about
// two nanoseconds of a processor for each element of inputs and outputs; on all of them. Pure.
std::map<TensorId, Suspects> Scan(const AttentionSpec& spec, const Inputs& inputs,
                                  const Outputs& actual, int64_t limit);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_VERIFY_SCAN_H_

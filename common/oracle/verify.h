// Verify: judges the outputs of a problem of any size, completely where that is
// quick, else on sampled rows and on rows that a scan of everything finds suspect
// (verify_scan.h). What `ringattn verify` and the benchmarks call.
//
//   const Report report = Verify(spec, {.q = q, .k = k, .v = v, .dout = dout},
//                                {.out = out, .lse = lse, .dq = dq, .dk = dk, .dv = dv}, {}, {});
//   puts(report.ToString().c_str());
//
// A row of dk or dv depends on the lse and delta of every query row. Where all of
// them cannot be computed in fp64, they are taken from the out and lse given, which
// are judged by samples of their own in the same report.
#ifndef RINGATTN_COMMON_ORACLE_VERIFY_H_
#define RINGATTN_COMMON_ORACLE_VERIFY_H_

#include <cstdint>

#include "common/attention/tensors.h"
#include "common/oracle/comparator.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// out and lse of the forward pass, from elsewhere than the outputs; null if there are
// none.
struct ForwardTensors {
  const void* out = nullptr;
  const float* lse = nullptr;
};

struct VerifyOptions {
  int64_t rows = 64;  // sampled rows of each tensor, and most suspects of it that are judged
  uint64_t seed = 1;
  // Limits in visible-or-not pairs (batch * heads * sum of sq * sk) times
  // (head_dim + head_dim_v). Below the first every row is judged (about 2 s of one
  // core at the limit); below the second the statistics for dk and dv are computed
  // if they are not given (about a minute).
  int64_t whole_cost = 400'000'000;
  int64_t statistics_cost = 12'000'000'000;
};

// Judges every output that is not null; each of them is in the report, in `tensors`
// or, with the reason, in `unjudged`: dq, dk and dv without inputs.dout, dk and dv of a
// large problem without out and lse. out and lse in `given` are judged too unless
// `actual` has them. Host memory; nothing is changed.
Report Verify(const AttentionSpec& spec, const Inputs& inputs, const Outputs& actual,
              const ForwardTensors& given, const VerifyOptions& options);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_VERIFY_H_

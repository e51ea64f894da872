// Verify: checks the outputs of a problem of any size. It compares small problems completely, and
// large ones on sampled rows and on suspects of a scan of all rows (verify_scan.h). `ringattn
// verify` and the benchmarks use it.
//
//   const Report report = Verify(spec, {.q = q, .k = k, .v = v, .dout = dout},
//                                {.out = out, .lse = lse, .dq = dq, .dk = dk, .dv = dv}, {}, {});
//   puts(report.ToString().c_str());
//
// A row of dk or dv depends on the lse and delta of every query row. If the problem is too large to
// compute these in fp64, Verify takes them from the given out and lse, which the same report checks
// by samples.
#ifndef RINGATTN_COMMON_ORACLE_VERIFY_H_
#define RINGATTN_COMMON_ORACLE_VERIFY_H_

#include <cstdint>

#include "common/attention/tensors.h"
#include "common/oracle/comparator.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// out and lse of the forward pass, if they are not among the outputs; null if there are none.
struct ForwardTensors {
  const void* out = nullptr;
  const float* lse = nullptr;
};

struct VerifyOptions {
  // sampled rows per tensor, and the maximum number of its suspects that are compared
  int64_t rows = 64;
  uint64_t seed = 1;
  // Limits in pairs, visible or not (batch * heads * sum of sq * sk), times (head_dim +
  // head_dim_v). Below whole_cost every row is compared (about 2 s on one core at the limit). Below
  // statistics_cost the statistics for dk and dv are computed if they are not given (about a
  // minute).
  int64_t whole_cost = 400'000'000;
  int64_t statistics_cost = 12'000'000'000;
};

// Checks every output that is not null. The report lists each of them in `tensors` or, with a
// reason, in `unjudged`: dq, dk and dv without inputs.dout, and dk and dv of a large problem
// without out and lse. Also checks out and lse in `given` unless `actual` has them. All memory is
// host memory and stays unchanged.
Report Verify(const AttentionSpec& spec, const Inputs& inputs, const Outputs& actual,
              const ForwardTensors& given, const VerifyOptions& options);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_VERIFY_H_

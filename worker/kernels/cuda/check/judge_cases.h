// Runs cases one after another on the kernels of one device and compares each with the oracle.
//
// Tests: check_on_fakes_test.cc, cuda_kernels_test.cc
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_JUDGE_CASES_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_JUDGE_CASES_H_

#include <functional>
#include <string>
#include <vector>

#include "common/oracle/comparator.h"
#include "worker/kernels/cuda/check/random_case.h"
#include "worker/kernels/cuda/check/run_case.h"
#include "worker/kernels/cuda/check/split_counts.h"
#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker::cuda::check {

struct Judgement {
  oracle::Report report;  // for a case in e4m3, only of the forward's results
  bool intact = true;     // see CaseOutputs
  bool same = true;       // the result of Repeats

  bool passed() const { return report.passed() && intact && same; }
  // Describes the errors, one per line.
  std::string ToString() const;
};

// Returns whether `again`, which runs the case once more, gives the results of the first run.
// Empty: cases run once.
using Repeats =
    std::function<bool(const Case&, const CaseOutputs& first, std::function<CaseOutputs()> again)>;

// Compares bit for bit; for a case in e4m3 only the forward's results.
bool GivesTheSame(const Case& c, const CaseOutputs& first, std::function<CaseOutputs()> again);

// Called for every case, in order; return false to stop.
using Hear = std::function<bool(const Case&, const Judgement&)>;

void JudgeCases(const std::vector<Case>& cases, const DeviceInfo& device, const Repeats& repeats,
                SplitCounts& splits, const Hear& hear);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_JUDGE_CASES_H_

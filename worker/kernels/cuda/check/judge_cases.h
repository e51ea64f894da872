// Cases one after another through the kernels of one device, each beside the oracle.
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
  oracle::Report report;  // of a case in e4m3 the forward's results alone
  bool intact = true;     // see CaseOutputs
  bool same = true;       // as Repeats says

  bool passed() const { return report.passed() && intact && same; }
  // What is not right, by lines.
  std::string ToString() const;
};

// Whether `again`, which runs the case once more, gives what the first run gave. Empty: cases run
// once.
using Repeats =
    std::function<bool(const Case&, const CaseOutputs& first, std::function<CaseOutputs()> again)>;

// Bit for bit, of a case in e4m3 the forward's results alone.
bool GivesTheSame(const Case& c, const CaseOutputs& first, std::function<CaseOutputs()> again);

// Hears of every case, in order; false: of no more.
using Hear = std::function<bool(const Case&, const Judgement&)>;

void JudgeCases(const std::vector<Case>& cases, const DeviceInfo& device, const Repeats& repeats,
                SplitCounts& splits, const Hear& hear);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_JUDGE_CASES_H_

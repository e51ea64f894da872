#include "worker/kernels/cuda/check/judge_cases.h"

#include "worker/kernels/cuda/check/expected_results.h"

namespace ringattn::worker::cuda::check {
namespace {

bool IsOfForwardAlone(const Case& c) {
  return c.spec.options.compute_dtype == ComputeDType::kFloat8E4M3;
}

}  // namespace

std::string Judgement::ToString() const {
  std::string lines = report.ToString();
  if (!intact) lines += "  guards or delta violated\n";
  if (!same) lines += "  other bits in a second run\n";
  return lines;
}

bool GivesTheSame(const Case& c, const CaseOutputs& first, std::function<CaseOutputs()> again) {
  const CaseOutputs second = again();
  if (IsOfForwardAlone(c)) return second.out == first.out && second.lse == first.lse;
  return second == first;
}

void JudgeCases(const std::vector<Case>& cases, const DeviceInfo& device, const Repeats& repeats,
                SplitCounts& splits, const Hear& hear) {
  ExpectedResults all(cases);
  for (const Case& c : cases) {
    const auto expected = all.Take();
    const auto run = [&] { return RunCase(c, *expected, device, splits); };
    const CaseOutputs outputs = run();
    const oracle::Outputs judged =
        IsOfForwardAlone(c) ? oracle::Outputs{.out = outputs.out.data(), .lse = outputs.lse.data()}
                            : outputs.view();
    Judgement judgement{.report = oracle::Compare(c.spec, expected->result, judged),
                        .intact = outputs.intact};
    if (repeats) judgement.same = repeats(c, outputs, run);
    if (!hear(c, judgement)) return;
  }
}

}  // namespace ringattn::worker::cuda::check

// The sweep over long problems: forward, then backward from its results, through
// the executor and the CPU kernels; out, lse, dq, dk and dv judged on sampled rows.
//
//   long_sweep_test --long_cases=40
//   long_sweep_test --long_case=7 --rows=500
#include <chrono>
#include <cstdio>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "common/oracle/verify.h"
#include "tests/cases/long_cases.h"
#include "tests/sweep/run_problem.h"

ABSL_FLAG(int64_t, long_cases, 40, "number of cases");
ABSL_FLAG(int64_t, long_case, -1, "run this case alone");
ABSL_FLAG(uint64_t, seed, 1, "seed of the cases");
ABSL_FLAG(int64_t, rows, 48, "sampled rows of each tensor");

namespace ringattn::tests {
namespace {

// Empty if everything passed, else what did not.
std::string RunLongCase(const LongCase& c, int64_t rows) {
  const oracle::InputTensors inputs =
      oracle::GenerateInputs(c.spec, oracle::DataKind::kNormal, c.data_seed, true);
  const Placement placement = {c.layout, c.world_size, c.stripe};
  TensorMap tensors = ToTensorMap(inputs);
  const auto forward = RunProblem(c.spec, placement, Direction::kForward, false, tensors,
                                  Engine::kExecutor, KernelSet::kCpu);
  if (!forward.ok()) return forward.status().ToString();
  if (!c.recompute_forward) {
    tensors[TensorId::kOut] = forward->at(TensorId::kOut);
    tensors[TensorId::kLse] = forward->at(TensorId::kLse);
  }
  const auto backward = RunProblem(c.spec, placement, Direction::kBackward, c.recompute_forward,
                                   tensors, Engine::kExecutor, KernelSet::kCpu);
  if (!backward.ok()) return backward.status().ToString();
  TensorMap outputs = *backward;
  outputs[TensorId::kOut] = forward->at(TensorId::kOut);
  outputs[TensorId::kLse] = forward->at(TensorId::kLse);
  const oracle::Report report =
      oracle::Verify(c.spec, inputs.view(), ToOutputs(outputs), {},
                     {.rows = rows, .seed = c.data_seed, .whole_cost = 0});
  if (report.tensors.size() != 5) return "not every tensor was judged\n" + report.ToString();
  return report.passed() ? "" : report.ToString();
}

int Run() {
  const int64_t only = absl::GetFlag(FLAGS_long_case);
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  const auto begin = std::chrono::steady_clock::now();
  int64_t run = 0, failed = 0;
  for (const LongCase& c :
       GenerateLongCases(seed, only >= 0 ? only + 1 : absl::GetFlag(FLAGS_long_cases))) {
    if (only >= 0 && c.index != only) continue;
    const std::string reason = RunLongCase(c, absl::GetFlag(FLAGS_rows));
    ++run;
    if (reason.empty()) continue;
    ++failed;
    std::printf("FAILED --seed=%llu %s\n%s\n", static_cast<unsigned long long>(seed),
                ToString(c).c_str(), reason.c_str());
    std::fflush(stdout);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("long sweep: %lld cases, %lld failed, %.1f s\n", static_cast<long long>(run),
              static_cast<long long>(failed), seconds);
  return failed == 0 && run > 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::tests

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::tests::Run();
}

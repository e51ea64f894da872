// The sweep: cases drawn pairwise over every option, placement and dtype, run
// through plan, schedule, executor and kernels in one process, each output judged
// by the oracle. A failure prints the flags that repeat it.
//
//   attention_sweep_test --cases=4000
//   attention_sweep_test --case=17 --engine=interpreter --kernels=naive
//
// The last line is a digest of all outputs: equal digests, equal bits. Those of shards
// add up (modulo 2^64) to that of all cases.
//
// Under `bazel test` with shard_count the shards share the cases.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "hwy/targets.h"
#include "tests/sweep/run_problem.h"

ABSL_FLAG(int64_t, cases, 4000, "number of cases");
ABSL_FLAG(int64_t, case, -1, "run this case alone");
ABSL_FLAG(uint64_t, seed, 1, "seed of the cases");
ABSL_FLAG(int64_t, max_cost, ringattn::tests::kDefaultCaseCost,
          "size of the largest cases, see tests/cases/case_generator.h");
ABSL_FLAG(std::string, shard, "0/1", "INDEX/COUNT: run the cases with index mod COUNT = INDEX");
ABSL_FLAG(std::string, data, "",
          "inputs of every case: normal, huge or vast (scores of 1e6 to 1e30); empty: as drawn");
ABSL_FLAG(bool, options, false,
          "add to the cases what only some requests have: attention sinks, a gradient of lse, "
          "score terms (bias, mask, segment ids, ALiBi, dropout)");
ABSL_FLAG(std::string, engine, "executor", "executor, interpreter or interpreter_by_row");
ABSL_FLAG(std::string, kernels, "cpu", "cpu or naive");
ABSL_FLAG(bool, twin, true,
          "also run the interpreter, with two threads, and expect the executor's bits");
ABSL_FLAG(std::string, simd, "best",
          "instruction set of the CPU kernels: best, avx3, avx2 or scalar");
ABSL_FLAG(bool, verbose, false, "print every case with its worst ratio to the bounds");

namespace ringattn::tests {
namespace {

struct Shard {
  int64_t index = 0;
  int64_t count = 1;
};

bool ParseShard(Shard* shard) {
  const char* index = std::getenv("TEST_SHARD_INDEX");
  const char* count = std::getenv("TEST_TOTAL_SHARDS");
  if (index != nullptr && count != nullptr) {
    *shard = {std::atoll(index), std::atoll(count)};
    // Tells Bazel that this binary shards itself.
    if (const char* file = std::getenv("TEST_SHARD_STATUS_FILE")) std::ofstream(file).close();
    return true;
  }
  long long i = 0, n = 0;
  if (std::sscanf(absl::GetFlag(FLAGS_shard).c_str(), "%lld/%lld", &i, &n) != 2) return false;
  *shard = {i, n};
  return n >= 1 && i >= 0 && i < n;
}

bool ParseEngine(Engine* engine) {
  const std::string name = absl::GetFlag(FLAGS_engine);
  if (name == "executor")
    *engine = Engine::kExecutor;
  else if (name == "interpreter")
    *engine = Engine::kInterpreter;
  else if (name == "interpreter_by_row")
    *engine = Engine::kInterpreterByRow;
  else
    return false;
  return true;
}

// False for an unknown name. The cases stay what they are but for their inputs.
bool ChooseData(std::vector<Case>& cases) {
  const std::string name = absl::GetFlag(FLAGS_data);
  if (name.empty()) return true;
  for (const oracle::DataKind kind :
       {oracle::DataKind::kNormal, oracle::DataKind::kHugeScores, oracle::DataKind::kVastScores}) {
    if (name != oracle::DataKindName(kind)) continue;
    for (Case& c : cases) c.data = kind;
    return true;
  }
  return false;
}

// False for an unknown name. A processor without the instruction set keeps its own.
bool ChooseSimd() {
  const std::string name = absl::GetFlag(FLAGS_simd);
  int64_t target = 0;
  if (name == "best") return true;
  if (name == "avx3")
    target = HWY_AVX3;
  else if (name == "avx2")
    target = HWY_AVX2;
  else if (name == "scalar")
    target = HWY_SCALAR;
  else
    return false;
  if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) {
    std::printf("this processor has no %s: running the best it has\n", name.c_str());
    return true;
  }
  hwy::SetSupportedTargetsForTest(target);
  return true;
}

// FNV-1a, over a case's number and each of its outputs.
class CaseDigest {
 public:
  explicit CaseDigest(int64_t index) { AddNumber(index); }
  void Add(TensorId id, const std::vector<uint8_t>& bytes) {
    AddNumber(static_cast<int64_t>(id));
    AddNumber(static_cast<int64_t>(bytes.size()));
    for (uint8_t byte : bytes) AddByte(byte);
  }
  uint64_t value() const { return value_; }

 private:
  void AddByte(uint8_t byte) { value_ = (value_ ^ byte) * 0x100000001b3; }
  void AddNumber(int64_t number) {
    for (int shift = 0; shift < 64; shift += 8) AddByte(static_cast<uint8_t>(number >> shift));
  }

  uint64_t value_ = 0xcbf29ce484222325;
};

uint64_t DigestOf(const Case& c, const TensorMap& outputs) {
  CaseDigest digest(c.index);
  for (const auto& [id, bytes] : outputs) digest.Add(id, bytes);
  return digest.value();
}

double WorstRatio(const oracle::Report& report) {
  double worst = 0.0;
  for (const oracle::TensorReport& tensor : report.tensors) {
    worst = std::max({worst, tensor.norm.ratio(), tensor.element.ratio()});
  }
  return worst;
}

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int Run() {
  Shard shard;
  Engine engine;
  const std::string kernel_name = absl::GetFlag(FLAGS_kernels);
  if (!ParseShard(&shard) || !ParseEngine(&engine) || !ChooseSimd() ||
      (kernel_name != "cpu" && kernel_name != "naive")) {
    std::fprintf(stderr, "bad --shard, --engine, --kernels or --simd; see --help\n");
    return 2;
  }
  const KernelSet kernels = kernel_name == "cpu" ? KernelSet::kCpu : KernelSet::kNaive;
  const int64_t only = absl::GetFlag(FLAGS_case);
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  const bool twin = absl::GetFlag(FLAGS_twin) && engine == Engine::kExecutor;
  std::vector<Case> cases = GenerateCases(seed, only >= 0 ? only + 1 : absl::GetFlag(FLAGS_cases),
                                          absl::GetFlag(FLAGS_max_cost));
  if (!ChooseData(cases)) {
    std::fprintf(stderr, "bad --data; see --help\n");
    return 2;
  }
  if (absl::GetFlag(FLAGS_options)) {
    for (Case& c : cases) {
      AddOptions(c);
      AddProbabilityRows(c);
    }
  }
  if (only < 0) std::printf("%s\n", ToString(CoverageOf(cases)).c_str());

  int64_t run = 0, failed = 0;
  uint64_t digest = 0;
  double worst = 0.0, oracle_seconds = 0.0;
  std::string worst_case;
  const auto begin = std::chrono::steady_clock::now();
  for (const Case& c : cases) {
    if (only >= 0 ? c.index != only : c.index % shard.count != shard.index) continue;
    const std::string name = "--seed=" + std::to_string(seed) + " " + ToString(c);
    const auto oracle_begin = std::chrono::steady_clock::now();
    const oracle::InputTensors inputs =
        oracle::GenerateInputs(c.spec, c.data, c.data_seed, c.direction == Direction::kBackward);
    const oracle::Result expected = oracle::EvaluateAll(c.spec, inputs.view());
    oracle_seconds += SecondsSince(oracle_begin);
    const CaseResult result = RunCase(c, inputs, expected, engine, kernels);
    std::string reason;
    if (!result.status.ok())
      reason = result.status.ToString();
    else if (!result.report.passed())
      reason = result.report.ToString();
    if (twin && reason.empty()) {
      const CaseResult other = RunCase(c, inputs, expected, Engine::kInterpreter, kernels);
      if (!other.status.ok())
        reason = "interpreter: " + other.status.ToString();
      else if (!other.report.passed())
        reason = "interpreter: " + other.report.ToString();
      // The naive device takes late keys: the executor joins its steps, which add up otherwise.
      else if (kernels != KernelSet::kNaive && other.outputs != result.outputs)
        reason = "the executor and its twin differ in bits";
    }
    ++run;
    digest += DigestOf(c, result.outputs);
    const double ratio = WorstRatio(result.report);
    if (ratio > worst) {
      worst = ratio;
      worst_case = name;
    }
    if (!reason.empty()) {
      ++failed;
      std::printf("FAILED %s\n%s\n", name.c_str(), reason.c_str());
    } else if (only >= 0 || absl::GetFlag(FLAGS_verbose)) {
      std::printf("passed %s\n%s", name.c_str(), result.report.ToString().c_str());
    }
    std::fflush(stdout);
  }
  std::printf("worst ratio to a bound %.2f: %s\n", worst, worst_case.c_str());
  std::printf("sweep: %lld cases, %lld failed, %.1f s (oracle %.1f s)\n",
              static_cast<long long>(run), static_cast<long long>(failed), SecondsSince(begin),
              oracle_seconds);
  std::printf("digest of the outputs: %016llx\n", static_cast<unsigned long long>(digest));
  return failed == 0 && run > 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::tests

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::tests::Run();
}

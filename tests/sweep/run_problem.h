// From a problem to its output tensors, inside one process: plan, schedule, then
// the executor on the in-process ring or its dumb twin.
#ifndef RINGATTN_TESTS_SWEEP_RUN_PROBLEM_H_
#define RINGATTN_TESTS_SWEEP_RUN_PROBLEM_H_

#include "absl/status/statusor.h"
#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/oracle/comparator.h"
#include "common/oracle/generator.h"
#include "common/oracle/oracle.h"
#include "common/schedule/schedule.h"
#include "tests/cases/case_generator.h"
#include "tests/sweep/reference_interpreter.h"

namespace ringattn::tests {

enum class Engine {
  kExecutor,          // a device and a thread per rank, the in-process transport
  kInterpreter,       // reference_interpreter.h
  kInterpreterByRow,  // the same with one piece per row
};

enum class KernelSet { kCpu, kNaive };

// How a problem is to be run; none of it may change the result.
struct Placement {
  Layout layout = Layout::kContiguous;
  int world_size = 1;
  int64_t stripe = 1;
  ScheduleKind schedule = ScheduleKind::kRing;  // over any number of ranks
  int64_t heads_per_step = 0;                   // of kAllGather; 0: all at once
  Tuning tuning = {};
  int64_t group_size = 0;  // of kDoubleRing
  int hosts = 1;  // of equally many consecutive ranks: transfers between them have their own lane
};

// Runs one direction. `inputs` has q, k, v, for backward also dout, and unless
// `recompute_forward` out and lse.
absl::StatusOr<TensorMap> RunProblem(const AttentionSpec& spec, const Placement& placement,
                                     Direction direction, bool recompute_forward,
                                     const TensorMap& inputs, Engine engine, KernelSet kernels);

TensorMap ToTensorMap(const oracle::InputTensors& inputs);

// out and lse as a correct forward pass might have returned them: the oracle's
// rounded twin, and the exact lse in fp32.
void AddForwardResult(const AttentionSpec& spec, const oracle::Result& result, TensorMap* inputs);

// The outputs that the comparator takes; `outputs` must outlive it.
oracle::Outputs ToOutputs(const TensorMap& outputs);

struct CaseResult {
  absl::Status status;  // not OK: the case did not run to its end
  oracle::Report report;
  TensorMap outputs;

  bool passed() const { return status.ok() && report.passed(); }
};

// Runs one case and judges every output against `expected`.
CaseResult RunCase(const Case& c, const oracle::InputTensors& inputs,
                   const oracle::Result& expected, Engine engine, KernelSet kernels);

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_RUN_PROBLEM_H_

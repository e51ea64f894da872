// Runs a whole ring in one process: one device and one thread per rank, connected by the in-process
// transport. For tests and benchmarks without a service.
#ifndef RINGATTN_WORKER_EXECUTOR_RUN_IN_PROCESS_H_
#define RINGATTN_WORKER_EXECUTOR_RUN_IN_PROCESS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/schedule/schedule.h"
#include "worker/executor/executor.h"

namespace ringattn::worker {

// Whole tensors (not shards), laid out as LayoutOf(spec, id) returns.
using TensorMap = std::map<TensorId, std::vector<uint8_t>>;

struct InProcessResult {
  TensorMap outputs;
  std::vector<ExecutionReport> reports;  // by rank
};

// Shards `inputs` by the plan, runs the schedule on `world_size` ranks and assembles the outputs.
// Calls `make_device` once per rank. Merges steps on devices that accept late keys (late_keys.h).
absl::StatusOr<InProcessResult> RunInProcess(
    const AttentionSpec& spec, const ShardPlan& plan, const Schedule& schedule,
    const TensorMap& inputs, const std::function<std::unique_ptr<Device>()>& make_device,
    const ExecuteOptions& options = {});

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_RUN_IN_PROCESS_H_

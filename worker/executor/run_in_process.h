// The whole ring in one process: a device and a thread per rank, the in-process
// transport between them. What tests and benchmarks without a service use.
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

// Whole tensors (not shards), laid out as LayoutOf(spec, id) says.
using TensorMap = std::map<TensorId, std::vector<uint8_t>>;

struct InProcessResult {
  TensorMap outputs;
  std::vector<ExecutionReport> reports;  // by rank
};

// Steps are joined on devices that take late keys (late_keys.h).
// Cuts `inputs` as the plan says, runs the schedule on `world_size` ranks and puts
// the outputs together. `make_device` is called once per rank.
absl::StatusOr<InProcessResult> RunInProcess(
    const AttentionSpec& spec, const ShardPlan& plan, const Schedule& schedule,
    const TensorMap& inputs, const std::function<std::unique_ptr<Device>()>& make_device,
    const ExecuteOptions& options = {});

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_RUN_IN_PROCESS_H_

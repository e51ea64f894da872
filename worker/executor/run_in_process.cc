#include "worker/executor/run_in_process.h"

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/comm/inproc/inproc_communicator.h"

namespace ringattn::worker {
namespace {

// Lets devices that accept late keys use them.
const KeyArrival kArrival{.lanes = {{{.bytes_per_second = 1e12}, {.bytes_per_second = 1e12}}}};

ShardMap MapOf(const AttentionSpec& spec, const ShardPlan& plan, TensorId id) {
  return ShardMap(spec, plan, id);
}

absl::Status FillInputs(const AttentionSpec& spec, const ShardPlan& plan, const TensorMap& inputs,
                        Operation* operation, Device* device) {
  const int rank = operation->program().rank;
  for (const BufferSpec& buffer : operation->program().buffers) {
    if (!buffer.input.has_value()) continue;
    const auto tensor = inputs.find(*buffer.input);
    if (tensor == inputs.end()) {
      return absl::InvalidArgumentError(absl::StrCat(TensorName(*buffer.input), " is missing"));
    }
    const ShardMap map = MapOf(spec, plan, *buffer.input);
    char* target = static_cast<char*>(operation->InputBuffer(*buffer.input)->data());
    for (const ByteRun& run : map.FromLocal(rank, 0, map.local_bytes(rank))) {
      absl::Status status = device->CopyFromHost(
          target + run.local_offset, tensor->second.data() + run.global_offset, run.bytes);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status CollectOutputs(const AttentionSpec& spec, const ShardPlan& plan, Operation* operation,
                            Device* device, TensorMap* outputs) {
  const int rank = operation->program().rank;
  for (const BufferSpec& buffer : operation->program().buffers) {
    if (!buffer.output.has_value()) continue;
    const ShardMap map = MapOf(spec, plan, *buffer.output);
    std::vector<uint8_t>& tensor = (*outputs)[*buffer.output];
    tensor.resize(map.global_bytes());
    const char* source = static_cast<char*>(operation->OutputBuffer(*buffer.output)->data());
    for (const ByteRun& run : map.FromLocal(rank, 0, map.local_bytes(rank))) {
      absl::Status status = device->CopyToHost(tensor.data() + run.global_offset,
                                               source + run.local_offset, run.bytes);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<InProcessResult> RunInProcess(
    const AttentionSpec& spec, const ShardPlan& plan, const Schedule& schedule,
    const TensorMap& inputs, const std::function<std::unique_ptr<Device>()>& make_device,
    const ExecuteOptions& options) {
  const int world_size = plan.world_size;
  std::vector<int> members(world_size);
  std::vector<std::unique_ptr<Device>> devices(world_size);
  std::vector<std::unique_ptr<Operation>> operations(world_size);
  for (int rank = 0; rank < world_size; ++rank) members[rank] = rank;
  for (int rank = 0; rank < world_size; ++rank) {
    devices[rank] = make_device();
    auto operation =
        Operation::Create(spec, plan, schedule.programs[rank], members, devices[rank].get(),
                          /*lent=*/{}, kArrival);
    if (!operation.ok()) return operation.status();
    operations[rank] = *std::move(operation);
    if (absl::Status status =
            FillInputs(spec, plan, inputs, operations[rank].get(), devices[rank].get());
        !status.ok()) {
      return status;
    }
  }

  std::vector<std::unique_ptr<Communicator>> ring = MakeInProcessRing(world_size);
  std::vector<absl::StatusOr<ExecutionReport>> reports(world_size,
                                                       absl::UnknownError("did not run"));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      reports[rank] =
          Execute(*operations[rank], *devices[rank], ring[rank].get(), options, nullptr);
      if (!reports[rank].ok()) ring[rank]->Abort(reports[rank].status().ToString());
    });
  }
  for (std::thread& thread : threads) thread.join();

  InProcessResult result;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!reports[rank].ok()) return reports[rank].status();
    absl::Status status =
        CollectOutputs(spec, plan, operations[rank].get(), devices[rank].get(), &result.outputs);
    if (!status.ok()) return status;
    result.reports.push_back(*std::move(reports[rank]));
  }
  return result;
}

}  // namespace ringattn::worker

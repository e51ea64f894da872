#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/executor/bind_call.h"
#include "worker/executor/executor.h"

namespace ringattn::worker {

absl::StatusOr<std::unique_ptr<Operation>> Operation::Create(AttentionSpec spec, ShardPlan plan,
                                                             Program program,
                                                             std::vector<int> members,
                                                             Device* device) {
  std::unique_ptr<Operation> operation(
      new Operation(std::move(spec), std::move(plan), std::move(program), std::move(members)));
  for (const BufferSpec& buffer : operation->program_.buffers) {
    auto memory = device->Allocate(buffer.bytes);
    if (!memory.ok()) {
      return absl::Status(memory.status().code(),
                          absl::StrCat("buffer ", buffer.name, ": ", memory.status().message()));
    }
    operation->buffers_.push_back(*std::move(memory));
  }
  absl::StatusOr<PreparedCalls> prepared = device->Prepare(operation->Bind());
  if (!prepared.ok()) return prepared.status();
  operation->prepared_ = *std::move(prepared);
  size_t index = 0;
  for (std::vector<ReadyCall>& step : operation->ready_) {
    for (ReadyCall& ready : step) ready.call = operation->prepared_[index++].get();
  }
  return operation;
}

absl::StatusOr<int64_t> Operation::WorkspaceBytes(const AttentionSpec& spec, const ShardPlan& plan,
                                                  const Program& program, const Device& device) {
  return device.WorkspaceBytes(Operation(spec, plan, program, {}).Bind());
}

Operation::Operation(AttentionSpec spec, ShardPlan plan, Program program, std::vector<int> members)
    : spec_(std::move(spec)),
      plan_(std::move(plan)),
      program_(std::move(program)),
      members_(std::move(members)) {}

Operation::~Operation() = default;

std::vector<KernelCall> Operation::Bind() {
  context_ = std::make_unique<const BindContext>(MakeBindContext(*this));
  std::vector<KernelCall> calls;
  for (const Step& step : program_.steps) {
    std::vector<ReadyCall>& ready = ready_.emplace_back();
    for (const ComputeCall& call : step.calls) {
      BoundCall bound = BindCall(*context_, *this, call);
      calls.push_back(std::move(bound.call));
      ready.push_back({nullptr, std::move(bound.accesses), std::move(bound.name)});
    }
  }
  return calls;
}

DeviceBuffer* Operation::InputBuffer(TensorId id) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (program_.buffers[i].input == id) return buffers_[i].get();
  }
  return nullptr;
}

DeviceBuffer* Operation::OutputBuffer(TensorId id) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (program_.buffers[i].output == id) return buffers_[i].get();
  }
  return nullptr;
}

int64_t Operation::ShardBytes(TensorId id) const {
  const TensorLayout layout = LayoutOf(spec_, id);
  return layout.ShardBytes(ShardRows(plan_, layout, program_.rank));
}

}  // namespace ringattn::worker

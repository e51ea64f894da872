#include "worker/executor/operation.h"

#include <algorithm>
#include <array>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "worker/executor/bind_call.h"
#include "worker/executor/late_keys.h"

namespace ringattn::worker {

namespace {

// Returns when the late keys of a call in step `first` should have arrived, relative to the start
// of the step. A lane carries its transfers one after another.
std::vector<absl::Duration> ArrivalsOf(const Program& program, size_t first,
                                       const std::vector<std::vector<Access>>& late_reads,
                                       const KeyArrival& arrival) {
  std::vector<absl::Duration> arrivals;
  std::array<absl::Duration, kLanes> ends;
  for (size_t i = 0; i < late_reads.size(); ++i) {
    const Step& step = program.steps[first + i];
    absl::Duration last = arrivals.empty() ? absl::Duration() : arrivals.back();
    for (Lane lane : kAllLanes) {
      const KeyArrival::InLane& keys = arrival.In(lane);
      const int64_t bytes = LongerWayBytes(step, lane);
      if (bytes == 0 || !arrival.may_be_late(lane)) continue;
      ends[IndexOf(lane)] += keys.delay + absl::Seconds(bytes / keys.bytes_per_second);
      if (BringsInLane(step, lane, late_reads[i])) last = std::max(last, ends[IndexOf(lane)]);
    }
    arrivals.push_back(last);
  }
  return arrivals;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Operation>> Operation::Bind(AttentionSpec spec, ShardPlan plan,
                                                           Program program,
                                                           std::vector<int> members, Device* device,
                                                           std::vector<LentBuffer> lent,
                                                           KeyArrival arrival) {
  std::unique_ptr<Operation> operation(new Operation(
      std::move(spec), std::move(plan), std::move(program), std::move(members), device));
  // The measured arrival time decides where a merged call splits its keys. Results are therefore
  // bit-equal only within one ring generation, so deterministic requests are not merged.
  const bool joins = arrival.may_be_late() && !operation->spec().options.deterministic;
  if (joins) operation->JoinLateKeys(arrival);
  const std::vector<Step>& steps = operation->program_.steps;
  for (size_t step = 0; step < steps.size(); ++step) {
    std::vector<ReadyCall>& ready = operation->ready_.emplace_back();
    for (const ComputeCall& call : steps[step].calls) {
      KernelCall& described =
          operation->described_.emplace_back(DescribeCall(*operation->context_, call));
      auto* const forward = std::get_if<ForwardCall>(&described);
      if (forward != nullptr && forward->has_late_keys()) {
        forward->late_after = ArrivalsOf(operation->program_, step, LateReadsOf(call), arrival);
      }
      ready.push_back({nullptr, AccessesOf(call), LateReadsOf(call), OpName(call.op)});
    }
  }
  if (absl::Status status = operation->Lend(std::move(lent)); !status.ok()) return status;
  absl::StatusOr<int64_t> workspace = device->WorkspaceBytes(operation->described_);
  if (!workspace.ok()) return workspace.status();
  operation->workspace_bytes_ = *workspace;
  return operation;
}

absl::Status Operation::Allocate() {
  for (size_t id = 0; id < buffers_.size(); ++id) {
    if (buffers_[id] != nullptr) continue;  // lent
    const BufferSpec& buffer = program_.buffers[id];
    auto memory = device_->Allocate(buffer.bytes);
    if (!memory.ok()) {
      return absl::Status(memory.status().code(),
                          absl::StrCat("buffer ", buffer.name, ": ", memory.status().message()));
    }
    buffers_[id] = *std::move(memory);
  }
  size_t index = 0;
  for (const Step& step : program_.steps) {
    for (const ComputeCall& call : step.calls) {
      SetAddresses(
          call, [this](const ByteRange& range) { return Address(range); }, described_[index++]);
    }
  }
  absl::StatusOr<PreparedCalls> prepared = device_->Prepare(std::exchange(described_, {}));
  if (!prepared.ok()) return prepared.status();
  prepared_ = *std::move(prepared);
  index = 0;
  for (std::vector<ReadyCall>& step : ready_) {
    for (ReadyCall& ready : step) ready.call = prepared_[index++].get();
  }
  FindOverlaps();
  return absl::OkStatus();
}

void Operation::FindOverlaps() {
  // The order of additions would affect the results' bits.
  if (spec_.options.deterministic) return;
  const ComputeCall* before = nullptr;
  const ReadyCall* ready_before = nullptr;
  for (size_t step = 0; step < ready_.size(); ++step) {
    for (size_t i = 0; i < ready_[step].size(); ++i) {
      const ComputeCall& call = program_.steps[step].calls[i];
      ReadyCall& ready = ready_[step][i];
      ready.overlaps_previous = before != nullptr && ready.call->adds_atomically() &&
                                ready_before->call->adds_atomically() &&
                                OnlyAddToTheSame(*before, call);
      before = &call;
      ready_before = &ready;
    }
  }
}

absl::StatusOr<std::unique_ptr<Operation>> Operation::Create(
    AttentionSpec spec, ShardPlan plan, Program program, std::vector<int> members, Device* device,
    std::vector<LentBuffer> lent, KeyArrival arrival) {
  auto operation = Bind(std::move(spec), std::move(plan), std::move(program), std::move(members),
                        device, std::move(lent), arrival);
  if (!operation.ok()) return operation;
  if (absl::Status status = (*operation)->Allocate(); !status.ok()) return status;
  return operation;
}

Operation::Operation(AttentionSpec spec, ShardPlan plan, Program program, std::vector<int> members,
                     Device* device)
    : spec_(std::move(spec)),
      plan_(std::move(plan)),
      program_(std::move(program)),
      members_(std::move(members)),
      device_(device),
      buffers_(program_.buffers.size()),
      context_(std::make_unique<const BindContext>(spec_, plan_, program_)) {}

Operation::~Operation() = default;

void Operation::JoinLateKeys(const KeyArrival& arrival) {
  const auto takes = [this](const ComputeCall& call) {
    const KernelCall described = DescribeCall(*context_, call);
    return device_->TakesLateKeys(std::get<ForwardCall>(described));
  };
  const auto takes_units = [this, &arrival](int ring_rank) {
    const auto peer = static_cast<size_t>(members_[ring_rank]);
    return peer < arrival.takes_compute_units.size() && arrival.takes_compute_units[peer];
  };
  const auto may_be_late = [&arrival](Lane lane) { return arrival.may_be_late(lane); };
  program_ = worker::JoinLateKeys(std::move(program_), takes, takes_units, may_be_late);
  buffers_.resize(program_.buffers.size());  // received blocks may have new ones
}

absl::Status Operation::Lend(std::vector<LentBuffer> lent) {
  for (LentBuffer& item : lent) {
    if (item.buffer < 0 || item.buffer >= static_cast<BufferId>(buffers_.size()) ||
        item.memory == nullptr || buffers_[item.buffer] != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("lent buffer ", item.buffer,
                       ": the program has no such buffer, or it is already filled"));
    }
    BufferSpec& spec = program_.buffers[item.buffer];
    if (item.memory->bytes() < spec.bytes) {
      return absl::InvalidArgumentError(absl::StrCat("lent buffer ", spec.name, " has ",
                                                     item.memory->bytes(),
                                                     " bytes; the program needs ", spec.bytes));
    }
    if (spec.input.has_value() && Overwrites(item.buffer)) {
      return absl::InvalidArgumentError(
          absl::StrCat("lent buffer ", spec.name, ": the program would overwrite it"));
    }
    spec.source = BufferSource::kRetained;
    buffers_[item.buffer] = std::move(item.memory);
  }
  return absl::OkStatus();
}

bool Operation::Overwrites(BufferId buffer) const {
  for (size_t step = 0; step < ready_.size(); ++step) {
    for (const Transfer& transfer : program_.steps[step].transfers) {
      const bool receives = transfer.kind == Transfer::Kind::kReceive;
      if (receives && transfer.range.buffer == buffer) return true;
    }
    for (const ReadyCall& call : ready_[step]) {
      for (const Access& access : call.accesses) {
        if (access.write && access.range.buffer == buffer) return true;
      }
    }
  }
  return false;
}

int64_t Operation::buffer_bytes() const {
  int64_t bytes = 0;
  for (const BufferSpec& buffer : program_.buffers) {
    if (buffer.source != BufferSource::kRetained) bytes += buffer.bytes;
  }
  return bytes;
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

std::shared_ptr<DeviceBuffer> Operation::ShareBuffer(TensorId id) const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (program_.buffers[i].input == id || program_.buffers[i].output == id) return buffers_[i];
  }
  return nullptr;
}

int64_t Operation::ShardBytes(TensorId id) const {
  const TensorLayout layout = LayoutOf(spec_, plan_, id);
  return layout.ShardBytes(ShardRows(plan_, layout, program_.rank));
}

}  // namespace ringattn::worker

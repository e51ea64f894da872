#include "common/schedule/program_builder.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/schedule/gradient_store_hints.h"

namespace ringattn {
namespace {

// Adds `more` to `range` and returns true if it follows or precedes it without a gap.
bool ExtendRange(ByteRange& range, const ByteRange& more) {
  if (range.buffer != more.buffer) return false;
  const bool follows = range.offset + range.bytes == more.offset;
  if (!follows && more.offset + more.bytes != range.offset) return false;
  range.offset = std::min(range.offset, more.offset);
  range.bytes += more.bytes;
  return true;
}

}  // namespace

ProgramBuilder::ProgramBuilder(const AttentionSpec& spec, const ShardPlan& plan, int rank)
    : spec_(spec), plan_(plan) {
  program_.rank = rank;
}

BufferId ProgramBuilder::AddBuffer(std::string name, int64_t bytes) {
  program_.buffers.push_back(
      {std::move(name), bytes, BufferSource::kScratch, std::nullopt, std::nullopt});
  return static_cast<BufferId>(program_.buffers.size()) - 1;
}

int64_t ProgramBuilder::ShardBytes(TensorId id) const {
  const TensorLayout layout = LayoutOf(spec_, plan_, id);
  return layout.ShardBytes(ShardRows(plan_, layout, rank()));
}

BufferId ProgramBuilder::AddTensor(TensorId id) {
  return AddBuffer(TensorName(id), ShardBytes(id));
}

BufferId ProgramBuilder::AddInput(TensorId id) {
  const BufferId buffer = AddTensor(id);
  program_.buffers[buffer].source = BufferSource::kUpload;
  program_.buffers[buffer].input = id;
  return buffer;
}

BufferId ProgramBuilder::AddOutput(TensorId id) {
  const BufferId buffer = AddTensor(id);
  program_.buffers[buffer].output = id;
  return buffer;
}

BufferId ProgramBuilder::InputOf(TensorId id) const {
  for (size_t buffer = 0; buffer < program_.buffers.size(); ++buffer) {
    if (program_.buffers[buffer].input == id) return static_cast<BufferId>(buffer);
  }
  return kNoBuffer;
}

ByteRange ProgramBuilder::Whole(BufferId buffer) const {
  return {buffer, 0, program_.buffers[buffer].bytes};
}

ByteRange ProgramBuilder::First(BufferId buffer, int64_t bytes) {
  int64_t& size = program_.buffers[buffer].bytes;
  size = std::max(size, bytes);
  return {buffer, 0, bytes};
}

BufferId ProgramBuilder::SlotBuffer(const Bundle& bundle, BundleTensor& tensor, int slot) {
  BufferId& buffer = tensor.slots[slot];
  if (buffer == kNoBuffer) {
    buffer = AddBuffer(absl::StrCat(bundle.slot_names[slot], ".", TensorName(tensor.id)), 0);
  }
  return buffer;
}

ByteRange ProgramBuilder::Range(const Bundle& bundle, BundleTensor& tensor,
                                const BlockLocation& place) {
  const int64_t row_bytes = spec_.shape.batch * tensor.row_bytes;
  const ByteRange range{SlotBuffer(bundle, tensor, place.slot), place.rows_before * row_bytes,
                        place.range.size() * row_bytes};
  int64_t& size = program_.buffers[range.buffer].bytes;
  size = std::max(size, range.offset + range.bytes);
  return range;
}

ByteRange ProgramBuilder::Range(Bundle& bundle, TensorId id, const BlockLocation& place) {
  return Range(bundle, bundle.Of(id), place);
}

std::vector<ProgramBuilder::Run> ProgramBuilder::RunsOf(const BlockLocation& source,
                                                        const BlockLocation& target,
                                                        const RowRange& rows) const {
  assert(source.range.begin <= rows.begin && rows.end <= source.range.end);
  assert(target.range.begin <= rows.begin && rows.end <= target.range.end);
  const int64_t batch = spec_.shape.batch;
  const bool one_run = source.range.size() == rows.size() && target.range.size() == rows.size();
  std::vector<Run> runs;
  for (int64_t b = 0; b < (one_run ? 1 : batch); ++b) {
    runs.push_back(
        {batch * source.rows_before + b * source.range.size() + rows.begin - source.range.begin,
         batch * target.rows_before + b * target.range.size() + rows.begin - target.range.begin,
         rows.size() * (one_run ? batch : 1)});
  }
  return runs;
}

void ProgramBuilder::Use(int64_t step) {
  if (static_cast<int64_t>(used_.size()) <= step) {
    used_.resize(step + 1, 0);
    steps_.resize(step + 1);
    late_.resize(step + 1);
  }
  used_[step] = 1;
}

void ProgramBuilder::UseAll(const std::vector<char>& used_steps) {
  for (size_t step = used_steps.size(); step-- > 0;) {
    if (used_steps[step]) Use(static_cast<int64_t>(step));
  }
}

void ProgramBuilder::Move(int64_t step, Bundle& bundle, int from, const BlockLocation& source,
                          int to, const BlockLocation& target, const RowRange& rows,
                          int64_t may_take) {
  Use(step);
  const auto add = [&](Transfer::Kind kind, int peer, const BlockLocation& here) {
    for (BundleTensor& tensor : bundle.tensors) {
      const BufferId buffer = Range(bundle, tensor, here).buffer;
      for (const Run& run : RunsOf(source, target, rows)) {
        const int64_t row = kind == Transfer::Kind::kSend ? run.source_row : run.target_row;
        steps_[step].transfers.push_back(
            {.kind = kind,
             .peer = peer,
             .range = {buffer, row * tensor.row_bytes, run.rows * tensor.row_bytes},
             .steps = static_cast<int>(may_take)});
      }
    }
  };
  if (from == rank()) add(Transfer::Kind::kSend, to, source);
  if (to == rank()) add(Transfer::Kind::kReceive, from, target);
}

void ProgramBuilder::AddTransfer(int64_t step, const Transfer& transfer) {
  Use(step);
  steps_[step].transfers.push_back(transfer);
}

void ProgramBuilder::AddCall(int64_t step, ComputeCall call) {
  Use(step);
  steps_[step].calls.push_back(std::move(call));
}

void ProgramBuilder::AddLateCall(int64_t step, ComputeCall call) {
  Use(step);
  late_[step].push_back(std::move(call));
}

void ProgramBuilder::AddZero(int64_t step, const ByteRange& target) {
  if (target.bytes == 0) return;
  Use(step);
  std::vector<ComputeCall>& calls = steps_[step].calls;
  for (auto zero = calls.rbegin(); zero != calls.rend() && zero->op == ComputeCall::Op::kZero;
       ++zero) {
    if (ExtendRange(zero->target, target)) return;
  }
  ComputeCall call;
  call.op = ComputeCall::Op::kZero;
  call.target = target;
  AddCall(step, std::move(call));
}

void ProgramBuilder::AddZeroRows(int64_t step, Bundle& bundle, const BlockLocation& target,
                                 const RowRange& rows) {
  for (BundleTensor& tensor : bundle.tensors) {
    const BufferId buffer = SlotBuffer(bundle, tensor, target.slot);
    for (const Run& run : RunsOf(target, target, rows)) {
      AddZero(step, {buffer, run.target_row * tensor.row_bytes, run.rows * tensor.row_bytes});
    }
  }
}

void ProgramBuilder::AddRowsLate(int64_t step, Bundle& bundle, const BlockLocation& source,
                                 const BlockLocation& target, const RowRange& rows) {
  for (BundleTensor& tensor : bundle.tensors) {
    const BufferId from = SlotBuffer(bundle, tensor, source.slot);
    const BufferId to = SlotBuffer(bundle, tensor, target.slot);
    for (const Run& run : RunsOf(source, target, rows)) {
      ComputeCall call;
      call.op = ComputeCall::Op::kAdd;
      const int64_t bytes = run.rows * tensor.row_bytes;
      call.source = {from, run.source_row * tensor.row_bytes, bytes};
      call.target = {to, run.target_row * tensor.row_bytes, bytes};
      AddLateCall(step, std::move(call));
    }
  }
}

void ProgramBuilder::AddConvertLate(int64_t step, BufferId source, BufferId target) {
  const ByteRange from = Whole(source);
  if (source == target || from.bytes == 0) return;
  ComputeCall call;
  call.op = ComputeCall::Op::kConvert;
  call.source = from;
  call.target = Whole(target);
  AddLateCall(step, std::move(call));
}

Program ProgramBuilder::Finish() {
  // used_until[i]: how many of the first i steps are used.
  std::vector<int> used_until = {0};
  for (char used : used_) used_until.push_back(used_until.back() + used);
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (!used_[i]) continue;
    for (Transfer& transfer : steps_[i].transfers) {
      const size_t end = std::min(i + transfer.steps, steps_.size());
      transfer.steps = used_until[end] - used_until[i];
    }
    for (ComputeCall& call : late_[i]) steps_[i].calls.push_back(std::move(call));
    program_.steps.push_back(std::move(steps_[i]));
  }
  AddStoreHints(program_);
  return std::move(program_);
}

}  // namespace ringattn

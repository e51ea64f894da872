#include "common/plan/schedule_builder.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace ringattn {

ScheduleBuilder::ScheduleBuilder(const AttentionSpec& spec, const ShardPlan& plan)
    : spec_(spec), plan_(plan) {
  const AttentionShape& shape = spec.shape;
  key_gradient_bytes_ = shape.num_kv_heads * shape.head_dim * ElementBytes(DType::kFloat32);
  value_gradient_bytes_ = shape.num_kv_heads * shape.head_dim_v * ElementBytes(DType::kFloat32);
  key_bytes_ = shape.num_kv_heads * shape.head_dim * ElementBytes(spec.dtype);
  value_bytes_ = shape.num_kv_heads * shape.head_dim_v * ElementBytes(spec.dtype);
  programs_.resize(plan.world_size);
  for (int rank = 0; rank < plan.world_size; ++rank) programs_[rank].rank = rank;
}

BufferId ScheduleBuilder::AddBuffer(int rank, std::string name, int64_t bytes) {
  std::vector<BufferSpec>& buffers = programs_[rank].buffers;
  buffers.push_back({std::move(name), bytes, std::nullopt, std::nullopt});
  return static_cast<BufferId>(buffers.size()) - 1;
}

int64_t ScheduleBuilder::ShardBytes(int rank, TensorId id) const {
  const TensorLayout layout = LayoutOf(spec_, id);
  return layout.ShardBytes(ShardRows(plan_, layout, rank));
}

BufferId ScheduleBuilder::AddTensor(int rank, TensorId id) {
  return AddBuffer(rank, TensorName(id), ShardBytes(rank, id));
}

BufferId ScheduleBuilder::AddInput(int rank, TensorId id) {
  const BufferId buffer = AddTensor(rank, id);
  programs_[rank].buffers[buffer].input = id;
  return buffer;
}

BufferId ScheduleBuilder::AddOutput(int rank, TensorId id) {
  const BufferId buffer = AddTensor(rank, id);
  programs_[rank].buffers[buffer].output = id;
  return buffer;
}

ByteRange ScheduleBuilder::Whole(int rank, BufferId buffer) const {
  return {buffer, 0, programs_[rank].buffers[buffer].bytes};
}

ByteRange ScheduleBuilder::Range(int rank, const RowsAt& rows, int64_t row_bytes) {
  const int64_t batch = spec_.shape.batch;
  const ByteRange range{rows.buffer, batch * rows.rows_before * row_bytes,
                        batch * rows.range.size() * row_bytes};
  int64_t& size = programs_[rank].buffers[rows.buffer].bytes;
  size = std::max(size, range.offset + range.bytes);
  return range;
}

std::vector<ScheduleBuilder::Run> ScheduleBuilder::RunsOf(const RowsAt& source,
                                                          const RowsAt& target,
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

void ScheduleBuilder::Move(int64_t step, int from, const RowsAt& source, int to,
                           const RowsAt& target, const RowRange& rows, int64_t row_bytes) {
  (void)Range(from, source, row_bytes);  // sizes the buffers
  (void)Range(to, target, row_bytes);
  for (const Run& run : RunsOf(source, target, rows)) {
    const int64_t bytes = run.rows * row_bytes;
    StepOf(steps_, step, from)
        .transfers.push_back(
            {Transfer::Kind::kSend, to, {source.buffer, run.source_row * row_bytes, bytes}});
    StepOf(steps_, step, to)
        .transfers.push_back(
            {Transfer::Kind::kReceive, from, {target.buffer, run.target_row * row_bytes, bytes}});
  }
}

void ScheduleBuilder::ZeroRows(int64_t step, int rank, const RowsAt& target, const RowRange& rows,
                               int64_t row_bytes) {
  for (const Run& run : RunsOf(target, target, rows)) {
    if (run.rows == 0) continue;
    ComputeCall call;
    call.op = ComputeCall::Op::kZero;
    call.target = {target.buffer, run.target_row * row_bytes, run.rows * row_bytes};
    AddCall(step, rank, std::move(call));
  }
}

void ScheduleBuilder::AddRowsLate(int64_t step, int rank, const RowsAt& source,
                                  const RowsAt& target, const RowRange& rows, int64_t row_bytes) {
  for (const Run& run : RunsOf(source, target, rows)) {
    ComputeCall call;
    call.op = ComputeCall::Op::kAdd;
    call.source = {source.buffer, run.source_row * row_bytes, run.rows * row_bytes};
    call.target = {target.buffer, run.target_row * row_bytes, run.rows * row_bytes};
    AddLateCall(step, rank, std::move(call));
  }
}

Step& ScheduleBuilder::StepOf(std::vector<std::vector<Step>>& steps, int64_t step, int rank) {
  if (static_cast<int64_t>(steps.size()) <= step) {
    steps.resize(step + 1, std::vector<Step>(programs_.size()));
  }
  return steps[step][rank];
}

void ScheduleBuilder::AddCall(int64_t step, int rank, ComputeCall call) {
  StepOf(steps_, step, rank).calls.push_back(std::move(call));
}

void ScheduleBuilder::AddLateCall(int64_t step, int rank, ComputeCall call) {
  StepOf(late_, step, rank).calls.push_back(std::move(call));
}

std::vector<Program> ScheduleBuilder::Finish() {
  const int64_t count = static_cast<int64_t>(std::max(steps_.size(), late_.size()));
  for (int64_t i = 0; i < count; ++i) {
    bool any = false;
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      Step& step = StepOf(steps_, i, static_cast<int>(rank));
      for (ComputeCall& call : StepOf(late_, i, static_cast<int>(rank)).calls) {
        step.calls.push_back(std::move(call));
      }
      any = any || !step.transfers.empty() || !step.calls.empty();
    }
    if (!any) continue;
    for (size_t rank = 0; rank < programs_.size(); ++rank) {
      programs_[rank].steps.push_back(std::move(steps_[i][rank]));
    }
  }
  return std::move(programs_);
}

}  // namespace ringattn

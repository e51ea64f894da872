// Building blocks of MakeSchedule: where every rank keeps its blocks, and the
// transfers and calls that use them.
#ifndef RINGATTN_COMMON_PLAN_SCHEDULE_BUILDER_H_
#define RINGATTN_COMMON_PLAN_SCHEDULE_BUILDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/plan/kv_route.h"
#include "common/plan/schedule.h"
#include "common/plan/shard_plan.h"

namespace ringattn {

// A range of one source's rows inside a buffer: [batch, range.size(), inner], after
// `rows_before` rows per batch row that belong to other ranges.
struct RowsAt {
  BufferId buffer = kNoBuffer;
  int64_t rows_before = 0;
  RowRange range;
};

// Collects programs. Steps are numbered from 0 and appear as they are named; within
// a step, transfers and calls keep the order in which they were added, and late
// calls come after the others. Not thread safe.
class ScheduleBuilder {
 public:
  ScheduleBuilder(const AttentionSpec& spec, const ShardPlan& plan);

  Program& program(int rank) { return programs_[rank]; }
  int64_t q_rows(int rank) const { return RowsIn(plan_.q[rank]); }
  int64_t kv_rows(int rank) const { return RowsIn(plan_.kv[rank]); }

  // Bytes of one row of a block's tensor.
  int64_t KeyBytes() const { return key_bytes_; }
  int64_t ValueBytes() const { return value_bytes_; }
  int64_t KeyGradientBytes() const { return key_gradient_bytes_; }
  int64_t ValueGradientBytes() const { return value_gradient_bytes_; }

  BufferId AddBuffer(int rank, std::string name, int64_t bytes);
  BufferId AddInput(int rank, TensorId id);
  BufferId AddOutput(int rank, TensorId id);
  BufferId AddTensor(int rank, TensorId id);  // scratch, of the tensor's shape
  int64_t ShardBytes(int rank, TensorId id) const;

  // The bytes of `rows` in its buffer, whose size grows to hold them.
  ByteRange Range(int rank, const RowsAt& rows, int64_t row_bytes);
  ByteRange Whole(int rank, BufferId buffer) const;

  // Copies `rows`, which both sides hold, from one rank to the other: as one
  // transfer where they lie in one run on both sides, else one per batch row.
  void Move(int64_t step, int from, const RowsAt& source, int to, const RowsAt& target,
            const RowRange& rows, int64_t row_bytes);

  void AddCall(int64_t step, int rank, ComputeCall call);
  void AddLateCall(int64_t step, int rank, ComputeCall call);
  // target = 0 over `rows`.
  void ZeroRows(int64_t step, int rank, const RowsAt& target, const RowRange& rows,
                int64_t row_bytes);
  // target += source over `rows`, fp32, as late calls.
  void AddRowsLate(int64_t step, int rank, const RowsAt& source, const RowsAt& target,
                   const RowRange& rows, int64_t row_bytes);

  // Puts everything together and drops steps in which nobody does anything.
  std::vector<Program> Finish();

 private:
  struct Run {
    int64_t source_row;
    int64_t target_row;
    int64_t rows;
  };
  std::vector<Run> RunsOf(const RowsAt& source, const RowsAt& target, const RowRange& rows) const;
  Step& StepOf(std::vector<std::vector<Step>>& steps, int64_t step, int rank);

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  int64_t key_bytes_;
  int64_t value_bytes_;
  int64_t key_gradient_bytes_;
  int64_t value_gradient_bytes_;
  std::vector<Program> programs_;
  std::vector<std::vector<Step>> steps_;  // [step][rank]
  std::vector<std::vector<Step>> late_;   // [step][rank], calls only
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_SCHEDULE_BUILDER_H_

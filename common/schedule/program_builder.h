// ProgramBuilder collects the program of one rank.
#ifndef RINGATTN_COMMON_SCHEDULE_PROGRAM_BUILDER_H_
#define RINGATTN_COMMON_SCHEDULE_PROGRAM_BUILDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/program/program.h"
#include "common/schedule/bundle.h"

namespace ringattn {

// Steps are numbered from 0 and may be added in any order. Within a step, transfers and calls keep
// the order in which they were added, and late calls follow the others. Steps that no rank uses are
// left out, so all ranks' builders must learn of the same steps: Move and Use apply to any rank,
// the other functions only to this one. The builder of kNoRank learns only of steps. Not thread
// safe.
class ProgramBuilder {
 public:
  // `spec` and `plan` must outlive the builder. `rank` may be kNoRank.
  ProgramBuilder(const AttentionSpec& spec, const ShardPlan& plan, int rank);

  int rank() const { return program_.rank; }
  const AttentionSpec& spec() const { return spec_; }
  int64_t q_rows() const { return RowsIn(plan_.q[rank()]); }
  int64_t kv_rows() const { return RowsIn(plan_.kv[rank()]); }

  BufferId AddBuffer(std::string name, int64_t bytes);
  BufferId AddInput(TensorId id);
  BufferId AddOutput(TensorId id);
  const std::vector<BufferSpec>& buffers() const { return program_.buffers; }
  const std::string& NameOf(BufferId buffer) const { return program_.buffers[buffer].name; }
  // Returns kNoBuffer if there is none.
  BufferId InputOf(TensorId id) const;
  BufferId AddTensor(TensorId id);  // scratch with the tensor's shape
  int64_t ShardBytes(TensorId id) const;
  ByteRange Whole(BufferId buffer) const;
  ByteRange WholeIfAny(BufferId buffer) const {
    return buffer == kNoBuffer ? kNone : Whole(buffer);
  }

  // Returns the buffer's first bytes. Grows the buffer to hold them.
  ByteRange First(BufferId buffer, int64_t bytes);
  // Returns the bytes of a range of rows in its slot. Adds the slot's buffer on first use and grows
  // it to hold them.
  ByteRange Range(Bundle& bundle, TensorId id, const BlockLocation& place);

  // Copies `rows`, which both locations hold, from one rank to the other. Per tensor this is one
  // transfer if the rows are contiguous on both sides, else one per batch row.
  //   may_take  steps that the transfer may take, beginning with its own (Transfer::steps)
  void Move(int64_t step, Bundle& bundle, int from, const BlockLocation& source, int to,
            const BlockLocation& target, const RowRange& rows, int64_t may_take = 1);
  // Records that some rank has a call in the step.
  void Use(int64_t step);
  // Records that some rank uses these steps, which another builder has learnt of.
  void UseAll(const std::vector<char>& used_steps);
  // By step: whether some rank uses it.
  const std::vector<char>& used_steps() const { return used_; }

  // Adds this rank's side of a transfer.
  void AddTransfer(int64_t step, const Transfer& transfer);

  void AddCall(int64_t step, ComputeCall call);
  void AddLateCall(int64_t step, ComputeCall call);
  // target = 0. Adds nothing if target is empty, and no call if it can extend the step's last
  // zeros.
  void AddZero(int64_t step, const ByteRange& target);
  // The same for `rows` of every tensor of a block.
  void AddZeroRows(int64_t step, Bundle& bundle, const BlockLocation& target, const RowRange& rows);
  // target += source for `rows` of every tensor of a block, fp32, as late calls.
  void AddRowsLate(int64_t step, Bundle& bundle, const BlockLocation& source,
                   const BlockLocation& target, const RowRange& rows);
  // target = source, rounded, for two whole buffers, as a late call. Adds nothing if both are the
  // same buffer.
  void AddConvertLate(int64_t step, BufferId source, BufferId target);

  Program Finish();

 private:
  struct Run {
    int64_t source_row;
    int64_t target_row;
    int64_t rows;
  };
  std::vector<Run> RunsOf(const BlockLocation& source, const BlockLocation& target,
                          const RowRange& rows) const;
  BufferId SlotBuffer(const Bundle& bundle, BundleTensor& tensor, int slot);
  ByteRange Range(const Bundle& bundle, BundleTensor& tensor, const BlockLocation& place);

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  Program program_;
  std::vector<Step> steps_;
  std::vector<std::vector<ComputeCall>> late_;  // by step
  std::vector<char> used_;                      // by step
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_PROGRAM_BUILDER_H_

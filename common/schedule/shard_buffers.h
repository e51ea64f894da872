// What every program has, whatever the schedule: the buffers of a rank's own shards and
// the calls that begin and end a pass over them.
#ifndef RINGATTN_COMMON_SCHEDULE_SHARD_BUFFERS_H_
#define RINGATTN_COMMON_SCHEDULE_SHARD_BUFFERS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "common/program/program.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/schedule.h"
#include "common/schedule/work_count.h"

namespace ringattn {

// kNoBuffer where the program has none. Accumulators are fp32: the output itself where
// that is fp32.
struct ShardBuffers {
  BufferId q = kNoBuffer;
  BufferId k = kNoBuffer;
  BufferId v = kNoBuffer;
  BufferId out = kNoBuffer;
  BufferId lse = kNoBuffer;
  BufferId out_acc = kNoBuffer;  // only where a forward pass has several calls
  BufferId dout = kNoBuffer;
  BufferId delta = kNoBuffer;
  BufferId dq = kNoBuffer;
  BufferId dk = kNoBuffer;
  BufferId dv = kNoBuffer;
  BufferId dq_acc = kNoBuffer;
  BufferId dk_acc = kNoBuffer;
  BufferId dv_acc = kNoBuffer;
  BufferId dsinks = kNoBuffer;  // of this rank's rows; rank 0's becomes the sum
  BufferId dbias = kNoBuffer;
  BufferId kv_segment_ids = kNoBuffer;
  BufferId probabilities = kNoBuffer;
};

// `accumulates`: outputs that are not fp32 have accumulators.
ShardBuffers AddShardBuffers(Direction direction, bool recompute_forward, ProgramBuilder& builder,
                             bool accumulates = true);

// Calls of one rank's forward pass with the program steps at which they run, kv operands
// and counts filled in.
using CallsAt = std::vector<std::pair<int64_t, ComputeCall>>;

// The rest of a forward pass: flags, the q side, the partial where there are several
// calls, and beside each call the one for the chosen rows' probabilities. Without a call, rows that
// see no key still become out = 0, lse = -inf, at `first_step`.
void AddForwardCalls(CallsAt calls, int64_t first_step, ShardBuffers& shard,
                     ProgramBuilder& builder);

// Where partials of out are summed up, of a pass that has several.
void AddOutAccumulator(ShardBuffers& shard, ProgramBuilder& builder);
// All of the rank's queries, no bytes yet.
QOperand AllQueries(const ProgramBuilder& builder);
// Inputs that only some requests have: of every call with keys, of a forward's last.
void AddTermOptions(const ProgramBuilder& builder, QOperand& operand);
void AddFinalOptions(const ProgramBuilder& builder, QOperand& operand);

// delta, zeros for dq_acc, if there is one, and dbias, and this rank's part of dsinks.
void StartBackward(int64_t step, const ShardBuffers& shard, ProgramBuilder& builder);
// Adds all ranks' parts of dsinks on rank 0, in the order of ranks; nothing without sinks. All
// ranks call it, with one step behind StartBackward's.
//   q_rows  by rank: a rank without queries has no part
void AddUpSinkGradients(int64_t step, const std::vector<int64_t>& q_rows, const ShardBuffers& shard,
                        ProgramBuilder& builder);
// A backward call of all the rank's queries, without keys.
ComputeCall BackwardCallOf(const ShardBuffers& shard, const ProgramBuilder& builder);
// The call, and where the bias's gradient is wanted the one for it over the same keys.
void AddBackwardCall(int64_t step, ComputeCall call, const ShardBuffers& shard,
                     ProgramBuilder& builder);
// A call's keys, their work counted in.
void AddOperand(ComputeCall& call, const KvOperand& operand, const WorkCount& work);
// Of the request's inputs of queries, which calls take: forward, backward, bias gradient.
absl::Span<const TensorId> TermOptions();
// The accumulators become the outputs.
void FinishBackward(int64_t step, const ShardBuffers& shard, ProgramBuilder& builder);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_SHARD_BUFFERS_H_

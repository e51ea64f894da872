// The part of a program that all schedules share: the buffers of a rank's shards and the calls that
// begin and end a pass over them.
#ifndef RINGATTN_COMMON_SCHEDULE_SHARD_BUFFERS_H_
#define RINGATTN_COMMON_SCHEDULE_SHARD_BUFFERS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "common/program/program.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/route/work_count.h"
#include "common/schedule/schedule.h"

namespace ringattn {

// The buffers of a rank's shards; kNoBuffer if the program has none. Accumulators are fp32; if the
// output is fp32, the output is its own accumulator.
struct ShardBuffers {
  BufferId q = kNoBuffer;
  BufferId k = kNoBuffer;
  BufferId v = kNoBuffer;
  BufferId out = kNoBuffer;
  BufferId lse = kNoBuffer;
  BufferId out_acc = kNoBuffer;  // only if a forward pass has several calls
  BufferId dout = kNoBuffer;
  BufferId delta = kNoBuffer;
  BufferId dq = kNoBuffer;
  BufferId dk = kNoBuffer;
  BufferId dv = kNoBuffer;
  BufferId dq_acc = kNoBuffer;
  BufferId dk_acc = kNoBuffer;
  BufferId dv_acc = kNoBuffer;
  BufferId dsinks = kNoBuffer;  // of this rank's rows; rank 0's becomes the sum over ranks
  BufferId dbias = kNoBuffer;
  BufferId kv_segment_ids = kNoBuffer;
  BufferId probabilities = kNoBuffer;
};

// `accumulates`: outputs that are not fp32 get accumulators.
ShardBuffers AddShardBuffers(Direction direction, bool recompute_forward, ProgramBuilder& builder,
                             bool accumulates = true);

// The calls of one rank's forward pass with their program steps. kv operands and counts are set.
using CallsAt = std::vector<std::pair<int64_t, ComputeCall>>;

// Whether a pass has calls before and after those that AddForwardCalls gets.
struct OtherCalls {
  bool before = false;
  bool after = false;
};

// Completes a forward pass: adds flags, the q side, the partial if there are several calls, and
// after each call the one for the chosen rows' probabilities. Without any call, adds one at
// `first_step` that sets out = 0, lse = -inf for all rows.
void AddForwardCalls(CallsAt calls, int64_t first_step, ShardBuffers& shard,
                     ProgramBuilder& builder, const OtherCalls& others = {});

// Adds the fp32 accumulator of out for a pass with several calls.
void AddOutAccumulator(ShardBuffers& shard, ProgramBuilder& builder);
// Returns an operand with all of the rank's queries and no byte ranges.
QOperand AllQueries(const ProgramBuilder& builder);
// Add inputs that only some requests have: to every call with keys, and to a forward's final call.
void AddTermOptions(const ProgramBuilder& builder, QOperand& operand);
void AddFinalOptions(const ProgramBuilder& builder, QOperand& operand);

// Adds the calls for delta, zeros for dq_acc (if there is one) and dbias, and this rank's part of
// dsinks.
void StartBackward(int64_t step, const ShardBuffers& shard, ProgramBuilder& builder);
// Adds all ranks' parts of dsinks on rank 0, in rank order. Does nothing without sinks. All ranks
// call it with the same step, which follows StartBackward's.
//   q_rows  by rank; a rank without queries has no part
void AddUpSinkGradients(int64_t step, const std::vector<int64_t>& q_rows, const ShardBuffers& shard,
                        ProgramBuilder& builder);
// Returns a backward call of all the rank's queries, without keys.
ComputeCall BackwardCallOf(const ShardBuffers& shard, const ProgramBuilder& builder);
// Adds the call and, if the bias has a gradient, the call for it over the same keys.
void AddBackwardCall(int64_t step, ComputeCall call, const ShardBuffers& shard,
                     ProgramBuilder& builder);
// Adds keys to a call and their work to its counts.
void AddOperand(ComputeCall& call, const KvOperand& operand, const WorkCount& work);
// Returns the optional inputs, sharded with the queries, of the forward, backward and bias gradient
// calls.
absl::Span<const TensorId> TermOptions();
// Converts the accumulators to the outputs.
void FinishBackward(int64_t step, const ShardBuffers& shard, ProgramBuilder& builder);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_SHARD_BUFFERS_H_

// ScheduleSimulator executes schedules on symbols instead of numbers. Every cell of a buffer
// records which row of which shard and tensor it holds; a partial result, which ranks' keys it
// includes; a gradient, which ranks have contributed to which row. So every defect of a schedule
// appears as an error: a read of unwritten memory, a transfer without its counterpart, a key seen
// twice or not at all, a lost partial or contribution. A transfer between hosts takes effect at its
// last step, and CheckLanes (common/program/lane_check.h) finds accesses that reuse its bytes
// before.
#ifndef RINGATTN_COMMON_SCHEDULE_TESTING_SCHEDULE_SIMULATOR_H_
#define RINGATTN_COMMON_SCHEDULE_TESTING_SCHEDULE_SIMULATOR_H_

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/schedule.h"
#include "common/schedule/testing/simulator_memory.h"

namespace ringattn {

// The keys that each rank's queries see, row by row (common/attention/band.h, whose test has the
// definition of the masks).
struct VisibleKeys {
  VisibleKeys(const AttentionSpec& spec, const ShardPlan& plan);
  bool SeesAny(int rank, int source) const;

  std::vector<std::vector<std::vector<char>>> seen;  // [rank][source][row]
  int64_t pairs = 0;
};

// Not thread safe.
class ScheduleSimulator {
 public:
  // `takes_hints`: takes every ComputeCall::store_hint, as a device may.
  ScheduleSimulator(const AttentionSpec& spec, const ShardPlan& plan, const Schedule& schedule,
                    bool takes_hints = false);

  // Returns an empty string if the schedule is valid, else the first error.
  std::string Run();

  // Bytes that each rank sent to each other rank.
  const std::vector<std::vector<int64_t>>& bytes_sent() const { return bytes_sent_; }

 private:
  struct Coverage {
    // [rank][source][row]: kv heads of source's row that rank's queries were computed with.
    std::vector<std::vector<std::vector<uint64_t>>> computed;
    int64_t pairs = 0;  // times kv heads
  };

  bool Fail(std::string what) { return memory_.Fail(std::move(what)); }

  // The required contents of operands, for the call's heads. `element_bytes` is that of kRows
  // forms.
  Block ShardBlock(TensorId id, int rank) const;  // all rows and heads
  Block QBlock(const ComputeCall& call, int tensor, int64_t dim, int64_t element_bytes) const;
  Block QStatistic(const ComputeCall& call, int tensor) const;
  Block QOf(const ComputeCall& call) const;
  Block DoutOf(const ComputeCall& call) const;
  Block KvBlock(const ComputeCall& call, const KvOperand& operand, TensorId id,
                int64_t element_bytes) const;
  int64_t KvHeads(const ComputeCall& call) const;
  uint64_t KvHeadMask(const ComputeCall& call) const;

  void FillInputs();
  bool RunTransfers(size_t step);
  bool RunCall(int rank, const ComputeCall& call);
  bool RunForward(int rank, const ComputeCall& call);
  bool RunMerge(int rank, const ComputeCall& call);
  bool Finish(int rank, const ComputeCall& call, uint64_t contributors);
  bool RunDelta(int rank, const ComputeCall& call);
  bool RunSinkGradient(int rank, const ComputeCall& call);
  bool RunBackward(int rank, const ComputeCall& call);
  bool RunProbabilities(int rank, const ComputeCall& call);
  bool RunBiasGradient(int rank, const ComputeCall& call);
  bool CheckGradientInputs(int rank, const ComputeCall& call);
  bool CheckSinks(int rank, const ComputeCall& call);
  // The score terms of every call with keys.
  int64_t PairShardBytes(TensorId id, int rank) const;  // of a bias, its gradient or a mask
  bool RequireTerms(int rank, const ComputeCall& call);
  bool RunAdd(int rank, const ComputeCall& call);
  bool RunConvert(int rank, const ComputeCall& call);
  bool RunCopy(int rank, const ComputeCall& call);
  // Writes the result itself, of which no byte has been written before.
  bool Store(int rank, const ByteRange& result, const Block& block, uint64_t contributors);
  // Adds to the sums of `block`'s rows.
  bool Contribute(int rank, const ByteRange& range, const Block& block, uint64_t contributors,
                  bool once);
  // Probability calls read no values.
  bool Cover(int rank, const ComputeCall& call, Coverage& coverage, bool with_values = true);

  bool CheckOutputs();
  bool CheckGradients(int rank, TensorId id);
  bool CheckSinkGradients();
  bool CheckCoverage(const Coverage& coverage, const char* pass);

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  const Schedule& schedule_;
  const bool takes_hints_;
  const VisibleKeys visible_;
  SymbolicMemory memory_;
  std::vector<std::map<BufferId, Cells>> converted_;  // [rank]: source of a kConvert
  // [rank that owns the queries][rank that computed on them, first kv head]: forward calls.
  std::vector<std::map<std::pair<int, int64_t>, int>> forward_calls_;
  std::vector<std::map<int64_t, uint64_t>> forward_done_;  // [rank][first kv head]: contributors
  Coverage forward_;
  Coverage backward_;
  Coverage bias_gradient_;
  Coverage probabilities_;
  std::vector<int> probability_calls_;
  std::vector<std::vector<int64_t>> bytes_sent_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_TESTING_SCHEDULE_SIMULATOR_H_

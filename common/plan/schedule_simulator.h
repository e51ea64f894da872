// Executes schedules on symbols instead of numbers: every cell of a K/V buffer
// knows which row of whose shard it holds, every cell of a gradient buffer which
// ranks have contributed to which row. Whatever a schedule does wrong (a read of
// something never written, a transfer without its counterpart, a key seen twice or
// not at all, a contribution lost on its way home) comes out as an error.
#ifndef RINGATTN_COMMON_PLAN_SCHEDULE_SIMULATOR_H_
#define RINGATTN_COMMON_PLAN_SCHEDULE_SIMULATOR_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/plan/schedule.h"
#include "common/plan/shard_plan.h"

namespace ringattn {

// Which keys each rank's queries see, row by row (common/attention/band.h, whose own test
// has the definition of the masks).
struct VisibleKeys {
  VisibleKeys(const AttentionSpec& spec, const ShardPlan& plan);
  std::vector<std::vector<std::vector<char>>> seen;  // [rank][source][row]
  int64_t pairs = 0;
};

// Not thread safe.
class ScheduleSimulator {
 public:
  ScheduleSimulator(const AttentionSpec& spec, const ShardPlan& plan, const Schedule& schedule);

  // Empty if the schedule is right, else what is wrong with it first.
  std::string Run();

  // K/V rows that each rank sent to each other rank, by key tensors.
  const std::vector<std::vector<int64_t>>& bytes_sent() const { return bytes_sent_; }

 private:
  // What a few bytes of a buffer hold.
  struct Cell {
    enum class State : uint8_t { kUnwritten, kNumbers, kKeys, kGradients };
    State state = State::kUnwritten;
    int64_t identity = -1;      // kKeys, kGradients: see Identity(); -1 = only zeros
    uint64_t contributors = 0;  // kGradients: ranks that have added to it
  };
  using Cells = std::vector<Cell>;

  struct Coverage {
    // [rank][source][row]: how often rank computed on the row, and whether it must.
    std::vector<std::vector<std::vector<int>>> computed;
  };

  bool Fail(std::string what);
  // The cells of a range; false and an error if it leaves the buffer.
  bool Slice(int rank, const ByteRange& range, Cell** begin, int64_t* count);
  bool Require(int rank, const ByteRange& range, const char* what);
  bool Write(int rank, const ByteRange& range, Cell value);
  ByteRange Whole(int rank, BufferId id) const;
  int64_t Identity(int source, bool is_value, int64_t batch, int64_t row, int64_t inner) const;

  void FillInputs();
  bool RunTransfers(size_t step);
  bool RunCall(int rank, const ComputeCall& call);
  bool RunForward(int rank, const ComputeCall& call);
  bool RunDelta(int rank, const ComputeCall& call);
  bool RunSinkGradient(int rank, const ComputeCall& call);
  bool RunBackward(int rank, const ComputeCall& call);
  bool RunProbabilities(int rank, const ComputeCall& call);
  bool RunBiasGradient(int rank, const ComputeCall& call);
  // What every call with keys has of the score terms.
  bool RequireTerms(int rank, const ComputeCall& call);
  bool RunAdd(int rank, const ComputeCall& call);
  bool CheckKeys(int rank, const KvOperand& operand, bool is_value);
  bool CheckSegmentIds(int rank, const KvOperand& operand);
  bool Contribute(int rank, const KvOperand& operand, bool is_value);
  bool Cover(int rank, const ComputeCall& call, Coverage& coverage);

  bool CheckOutputs();
  bool CheckGradients(int rank, TensorId id, bool is_value);
  bool CheckSinkGradients();
  bool CheckCoverage(const Coverage& coverage, const char* pass, int64_t pairs);

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  const Schedule& schedule_;
  const VisibleKeys visible_;
  std::string error_;
  int64_t key_cells_;  // per row
  int64_t value_cells_;
  std::vector<std::vector<Cells>> memory_;            // [rank][buffer]
  std::vector<std::map<BufferId, Cells>> converted_;  // [rank]: source of a kConvert
  std::vector<int> forward_calls_;
  std::vector<char> forward_done_;
  Coverage forward_;
  Coverage backward_;
  Coverage bias_gradient_;
  Coverage probabilities_;
  std::vector<int> probability_calls_;
  int64_t forward_pairs_ = 0;
  int64_t backward_pairs_ = 0;
  int64_t bias_gradient_pairs_ = 0;
  std::vector<std::vector<int64_t>> bytes_sent_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_SCHEDULE_SIMULATOR_H_

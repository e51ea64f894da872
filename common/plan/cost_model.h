// The cost model: predicts the time of a program from the rates of devices and links. Pure.
#ifndef RINGATTN_COMMON_PLAN_COST_MODEL_H_
#define RINGATTN_COMMON_PLAN_COST_MODEL_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/plan/planner.h"
#include "common/program/program.h"
#include "common/schedule/step_classes.h"

namespace ringattn {

// Returns the floating point operations of `pairs` visible pairs per batch row and head.
double FlopsOfPairs(const AttentionSpec& spec, Direction direction, bool recompute_forward,
                    double pairs);

// Returns the floating point operations of a call, in whole tiles as kernels execute them.
double FlopsOfCall(const AttentionSpec& spec, const ComputeCall& call);

// Predicts the time of a schedule from its programs, which are added one at a time, or from their
// classes (step_classes.h). Not thread safe.
//
// A rank computes step after step, and exchanges step after step inside its host, at the link rate.
//   - The calls of a step wait for the transfers of earlier steps, and for conflicting transfers
//     of their own step.
//   - The transfers of a step wait, on both ranks, for the transfers of the step before, and for
//     its calls if these conflict with them, otherwise for the calls of the step before that.
//   - A transfer between hosts overlaps all steps that it may take (Transfer::steps). It moves at
//     most at the rate of one rank. Ranks of a host share the host's rate: their transfers use it
//     one after the other, in the order in which both ranks are ready.
class CostSum {
 public:
  // `host_of_rank`: empty if all ranks are on one host. `spec` and `inputs` must outlive this.
  CostSum(const AttentionSpec& spec, const PlannerInputs& inputs, std::vector<int> host_of_rank);

  // Adds the program of the next rank.
  // REQUIRES: AssignLanes has set the program's lanes from host_of_rank.
  void Add(const Program& program);

  // Adds all ranks. Builds the steps of the classes' representatives only.
  // REQUIRES: no rank has been added; the classes were found with host_of_rank.
  void AddAll(const ClassedPrograms& programs);

  // Stores the recipe and the shards in the plan, without hosts and reason.
  // REQUIRES: all ranks have been added.
  Plan Finish(const ProgramRecipe& recipe, ShardPlan shards) &&;

 private:
  // The transfers of a rank to one rank of another host that begin in one step.
  struct Sent {
    int to = 0;     // relative to the rank
    int steps = 1;  // that it may take
    double bytes = 0;
  };
  // A step of a rank. Peers are relative to the rank, so that several ranks may have the step.
  struct RankStep {
    double compute_seconds = 0;   // with launches
    double exchange_seconds = 0;  // inside the host
    double between_seconds = 0;   // between hosts, at the rate of one rank
    std::vector<int> peers;       // inside the host
    std::vector<Sent> sent;       // to other hosts
    // By sender on another host: the calls of the step need what arrives in it.
    std::vector<int> needed_from;
    bool exchange_before_calls = false;  // the calls need the transfers inside the host
    bool after_last_calls = false;       // a transfer needs the calls of the step before
    std::vector<double> flops;           // of the calls' unmasked pairs, call by call

    // If the rank never waits for others.
    double seconds() const {
      return std::max({compute_seconds, exchange_seconds, between_seconds});
    }
  };
  // The bytes of a buffer, by the number of its name.
  struct NamedBytes {
    int name = 0;
    int64_t bytes = 0;
  };
  // Consecutive steps, all of whose figures several ranks share.
  struct StepRun {
    int first = 0;  // index of steps_
    int count = 0;
    int64_t tiles = 0;
    int64_t sent_bytes = 0;
    std::vector<NamedBytes> buffers;  // at least these bytes
  };
  // The progress of all ranks: when they have ended the calls of a step, when the transfers inside
  // the host, and when those between hosts that had to end.
  struct Progress {
    std::vector<double> calls, exchanges, arrivals;
  };

  class CallAccesses;  // what the calls of a step read and write

  RankStep CostOf(int rank, const Step& step, const CallAccesses& calls,
                  const CallAccesses& last_calls) const;
  // Adds steps [begin, end) of a program as a run. Returns its index.
  int AddRun(const Program& program, int begin, int end);
  std::vector<NamedBytes> Named(const std::vector<BufferSpec>& buffers);
  // Adds the steps and the figures of a run to the last rank.
  void AppendRun(const StepRun& run);

  const RankStep& StepOf(int rank, size_t step) const {
    return steps_[step_ids_[rank * step_count_ + step]];
  }
  // Return a peer relative to a rank, and the reverse.
  int Relative(int rank, int peer) const;
  int Peer(int rank, int relative) const;
  // Sets when the transfers of the step end.
  //   before, earlier  the progress after the step before and the one before that
  void Exchange(size_t step, const Progress& before, const Progress& earlier, Progress& now);
  void ExchangeBetweenHosts(size_t step);

  const AttentionSpec& spec_;
  const PlannerInputs& inputs_;
  const std::vector<int> host_of_rank_;
  int hosts_ = 1;
  std::vector<RankStep> steps_;  // different ones, or one of each rank and step
  std::vector<StepRun> runs_;
  std::unordered_map<std::string, int> names_;  // of buffers
  int world_size_ = 0;
  int group_size_ = 0;  // of AddAll's classes; 0: programs were added
  size_t step_count_ = 0;
  std::vector<int32_t> step_ids_;  // indices of steps_, by rank, then step
  double rank_seconds_ = 0;        // of the last rank
  bool any_sent_ = false;          // between hosts
  std::vector<double> ready_;      // by rank: since when the transfers of a step may begin
  // When a direction of a link is free.
  struct Links {
    std::vector<double> out, in;
    // Adds a transfer and returns when it ends.
    double Occupy(int from, int to, double ready, double seconds);
  };
  Links rank_links_, host_links_;
  // By rank and step: when the transfers between hosts end whose last step it is. Empty if there
  // are none.
  struct Arrivals {
    double before_calls = 0;
    double all = 0;
  };
  std::vector<std::vector<Arrivals>> arrivals_;
  Plan plan_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_COST_MODEL_H_

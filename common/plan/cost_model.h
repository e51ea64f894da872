// The cost model: predicts the time of a program from the rates of devices and links. Pure.
#ifndef RINGATTN_COMMON_PLAN_COST_MODEL_H_
#define RINGATTN_COMMON_PLAN_COST_MODEL_H_

#include <cstdint>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/plan/planner.h"
#include "common/program/program.h"

namespace ringattn {

// Returns the floating point operations of `pairs` visible pairs per batch row and head.
double FlopsOfPairs(const AttentionSpec& spec, Direction direction, bool recompute_forward,
                    double pairs);

// Returns the floating point operations of a call, in whole tiles as kernels execute them.
double FlopsOfCall(const AttentionSpec& spec, const ComputeCall& call);

// Predicts the time of a schedule, to which programs are added one at a time. Not thread safe.
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

  // REQUIRES: AssignLanes has set the program's lanes from host_of_rank. Ranks are added in order.
  void Add(const Program& program);

  // Stores the recipe and the shards in the plan, without hosts and reason.
  // REQUIRES: the programs of all ranks have been added.
  Plan Finish(const ProgramRecipe& recipe, ShardPlan shards) &&;

 private:
  // The transfers of a rank to one rank of another host that begin in one step.
  struct Sent {
    int to = 0;
    int steps = 1;  // that it may take
    double bytes = 0;
  };
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
  };
  // The progress of all ranks: when they have ended the calls of a step, when the transfers inside
  // the host, and when those between hosts that had to end.
  struct Progress {
    std::vector<double> calls, exchanges, arrivals;
  };

  class CallAccesses;  // what the calls of a step read and write

  RankStep CostOf(const Step& step, const CallAccesses& calls,
                  const CallAccesses& last_calls) const;
  // Sets when the transfers of the step end.
  //   before, earlier  the progress after the step before and the one before that
  void Exchange(size_t step, const Progress& before, const Progress& earlier, Progress& now);
  void ExchangeBetweenHosts(size_t step, const std::vector<double>& ready);
  // Returns since when the rank's transfers of the step may begin.
  double ReadyToExchange(int rank, size_t step, const Progress& before,
                         const Progress& earlier) const;
  const AttentionSpec& spec_;
  const PlannerInputs& inputs_;
  const std::vector<int> host_of_rank_;
  int hosts_ = 1;
  std::vector<std::vector<RankStep>> ranks_;
  // When a direction of a link is free.
  struct Links {
    std::vector<double> out, in;
    // Adds a transfer and returns when it ends.
    double Occupy(int from, int to, double ready, double seconds);
  };
  Links rank_links_, host_links_;
  // By rank and step: when the transfers between hosts end whose last step it is.
  struct Arrivals {
    double before_calls = 0;
    double all = 0;
  };
  std::vector<std::vector<Arrivals>> arrivals_;
  Plan plan_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_COST_MODEL_H_

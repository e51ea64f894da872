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

// Sums up the cost of a schedule, one program at a time. Not thread safe.
//
// A step takes the longest of: its computation; its transfers inside the host, at the link rate;
// its transfers between hosts, at the rate between hosts. Ranks of one host share that rate, so the
// bytes of all of them in one step are added up. A transfer that may take several steps
// (Transfer::steps) is divided equally among them.
class CostSum {
 public:
  // `host_of_rank`: empty if all ranks are on one host. `spec` and `inputs` must outlive this.
  CostSum(const AttentionSpec& spec, const PlannerInputs& inputs, std::vector<int> host_of_rank);

  // REQUIRES: AssignLanes has set the program's lanes from host_of_rank.
  void Add(const Program& program);

  // Stores the recipe and the shards in the plan, without hosts and reason.
  Plan Finish(const ProgramRecipe& recipe, ShardPlan shards) &&;

 private:
  struct HostBytes {
    double sent = 0;
    double received = 0;
  };
  struct StepCost {
    double seconds = 0;            // of the busiest rank
    double launches = 0;           // the part of it that overlaps nothing
    double overhead = 0;           // of transfers between hosts
    std::vector<HostBytes> hosts;  // to and from other hosts
  };

  // What a rank exchanges with other hosts during a step.
  struct BetweenHosts {
    HostBytes bytes;
    double overhead_seconds = 0;
  };

  std::vector<BetweenHosts> BetweenHostsByStep(const Program& program) const;
  double SecondsOfStep(int rank, const Step& step, const BetweenHosts& between,
                       StepCost* cost) const;

  const AttentionSpec& spec_;
  const PlannerInputs& inputs_;
  const std::vector<int> host_of_rank_;
  int hosts_ = 1;
  std::vector<StepCost> steps_;
  Plan plan_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_COST_MODEL_H_

// TimingSimulator runs the programs of all ranks on simulated devices and links and returns how
// long they take. Unlike the cost model, which adds up steps, it follows each call and each
// transfer: what they wait for, and how transfers share a link.
//
//   Device       executes the calls of its rank in order, one at a time.
//   Lane         starts the transfers of its rank step by step: all transfers of a step in the lane
//                together, when those of the step before in the same lane have ended.
//   Dependency   a call waits for conflicting transfers of its step and earlier ones; a transfer
//                waits for conflicting calls of earlier steps and for conflicting earlier
//                transfers.
//   Transfer     begins when both ranks have started it. Inside a host, a rank sends at the link's
//                rate, shared by what it sends, and receives at the same rate. Between hosts, this
//                holds with the rate of one rank to another host, and all ranks of a host share
//                the host's rate, per direction.
//
// Tests: double_ring_times_test.cc
#ifndef RINGATTN_COMMON_PLAN_TESTING_TIMING_SIMULATOR_H_
#define RINGATTN_COMMON_PLAN_TESTING_TIMING_SIMULATOR_H_

#include <vector>

#include "common/attention/attention_spec.h"
#include "common/plan/planner.h"
#include "common/program/program.h"

namespace ringattn {

struct SimulatedTimes {
  double seconds = 0;                // until the last rank has ended
  std::vector<double> busy_seconds;  // by rank, of its device

  // The time in which the busiest device waits for transfers or for other ranks.
  double exposed_seconds() const;
};

// Simulates the programs. Rates and overheads are those of `inputs`.
//   host_of_rank  empty: all ranks are on one host
// REQUIRES: AssignLanes has set the lanes from host_of_rank, and every send has its receive.
SimulatedTimes SimulateTimes(const AttentionSpec& spec, const std::vector<Program>& programs,
                             const PlannerInputs& inputs, const std::vector<int>& host_of_rank);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_TESTING_TIMING_SIMULATOR_H_

// Planner inputs from the topology of a running service.
// Tests: planner_inputs_test.cc.
#ifndef RINGATTN_CLIENT_CLI_PLANNER_INPUTS_H_
#define RINGATTN_CLIENT_CLI_PLANNER_INPUTS_H_

#include "common/plan/planner.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn::client::cli {

// Returns the workers in the ring, and the slowest one's rates for this request; defaults if no
// worker has measured them. A topology does not contain the single-device threshold.
PlannerInputs InputsOf(const v1::Topology& topology, const AttentionSpec& spec,
                       Direction direction);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_PLANNER_INPUTS_H_

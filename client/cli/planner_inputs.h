// A running service's figures, as its planner uses them.
#ifndef RINGATTN_CLIENT_CLI_PLANNER_INPUTS_H_
#define RINGATTN_CLIENT_CLI_PLANNER_INPUTS_H_

#include "common/plan/planner.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn::client::cli {

// The workers that are in the ring and the slowest one's figures for this request; defaults
// where none has measured. The single-device threshold is not in a topology.
PlannerInputs InputsOf(const v1::Topology& topology, const AttentionSpec& spec,
                       Direction direction);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_PLANNER_INPUTS_H_

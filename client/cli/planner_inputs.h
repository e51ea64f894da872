// Planner inputs from the topology of a running service.
// Tests: planner_inputs_test.cc.
#ifndef RINGATTN_CLIENT_CLI_PLANNER_INPUTS_H_
#define RINGATTN_CLIENT_CLI_PLANNER_INPUTS_H_

#include <string>
#include <vector>

#include "common/plan/planner.h"
#include "ringattn/v1/cluster.pb.h"

namespace ringattn::client::cli {

// Returns the workers in the ring and their hosts, and the slowest worker's rates for this request;
// defaults if no worker has measured them. A topology does not contain the server's limits: the
// single-device threshold, and the rate that it assumes between hosts.
//   named              the members that the request names; empty: the service chooses them
//   default_host_link  bytes/s between hosts if no worker has measured them
PlannerInputs InputsOf(const v1::Topology& topology, const AttentionSpec& spec, Direction direction,
                       const std::vector<std::string>& named, double default_host_link);

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_PLANNER_INPUTS_H_

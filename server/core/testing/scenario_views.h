// The queries of scenarios (scenario.h): views of the coordinator's state as text.
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_VIEWS_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_VIEWS_H_

#include <string>
#include <utility>
#include <vector>

#include "ringattn/v1/cluster.pb.h"
#include "server/core/coordinator.h"
#include "server/core/testing/scenario_args.h"

namespace ringattn::server {

// Lines of a trace: the worker or stream that they concern (may be empty), and the text.
using ScenarioLines = std::vector<std::pair<std::string, std::string>>;

// Actions that the coordinator has emitted so far.
struct ScenarioHistory {
  const v1::Topology& published;  // at the newest TopologyChanged
  size_t losses = 0;              // number of LostWorker actions
};

// Returns true for the verbs of queries in scenario.h.
bool IsQuery(const std::string& verb);
// REQUIRES: IsQuery(args[0]).
ScenarioLines RunQuery(const Coordinator& core, const Args& args, const ScenarioHistory& history);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_VIEWS_H_

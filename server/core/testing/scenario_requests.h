// The requests of scenarios (scenario.h).
#ifndef RINGATTN_SERVER_CORE_TESTING_SCENARIO_REQUESTS_H_
#define RINGATTN_SERVER_CORE_TESTING_SCENARIO_REQUESTS_H_

#include <string>

#include "absl/time/time.h"
#include "server/core/coordinator.h"
#include "server/core/testing/scenario_args.h"

namespace ringattn::server {

// Returns the id of the region with this name. REQUIRES: at most 16 characters.
std::string RegionId(const std::string& name);

// Returns the request of "request S ...". A Backward that reads a residual takes the Forward's
// values from `core`, as at the edge.
RequestArrived RequestOf(const Args& args, StreamId stream, absl::Time now,
                         const Coordinator& core);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_TESTING_SCENARIO_REQUESTS_H_

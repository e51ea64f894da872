// Rings over hosts: which hosts a ring of some size spans, and the rings that use whole hosts.
// Tests: host_rings_test.cc
#ifndef RINGATTN_COMMON_PLAN_HOST_RINGS_H_
#define RINGATTN_COMMON_PLAN_HOST_RINGS_H_

#include <cstdint>
#include <vector>

#include "common/plan/planner.h"

namespace ringattn {

// A ring of all workers of some hosts.
struct HostRing {
  int hosts = 1;
  int workers = 0;
  // The inputs for these hosts. The figures are those of the slowest member of these hosts if
  // has_own_figures, otherwise of all hosts.
  PlannerInputs inputs;
  bool has_own_figures = false;
};

// Returns the rings of whole hosts that the planner compares: of one host, two, four and so on, and
// of all. A ring of more hosts contains those of fewer. The hosts with the most workers come first.
//
// If a host's devices or links have less than half the rate of another's, the hosts that compute
// most come first, and the figures of a ring are those of its hosts, so that a slow host is left
// out where it would hold up the others. This does not apply to deterministic requests. Rings of
// fewer than `min_workers` workers are left out. Never empty if there are hosts; if no ring has
// min_workers, the ring of all is the only one.
std::vector<HostRing> RingsOfWholeHosts(const PlannerInputs& inputs, bool deterministic,
                                        int min_workers);

// Returns the host of each rank of a ring over the fewest hosts that have as many workers, the
// largest hosts first; ranks of one host are neighbours. Placement follows the same rule
// (server/core/requests/placement.h). Empty if one host has enough workers. If the client names the
// members, returns their hosts instead.
// REQUIRES: world_size is at most the number of ready workers.
std::vector<int> HostOfEachRank(const PlannerInputs& inputs, int world_size);

// Returns the number of ranks of each host if all hosts have equally many and they are neighbours,
// else 0. The ring size if all ranks are on one host.
//   host_of_rank  empty: all ranks are on one host
int64_t RanksPerHost(const std::vector<int>& host_of_rank, int world_size);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_HOST_RINGS_H_

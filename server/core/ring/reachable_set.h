// The largest set of vertices that are all connected to each other, by the criteria of a ring.
// Pure. Tests: reachability_test.cc
#ifndef RINGATTN_SERVER_CORE_RING_REACHABLE_SET_H_
#define RINGATTN_SERVER_CORE_RING_REACHABLE_SET_H_

#include <cstdint>
#include <string>
#include <vector>

namespace ringattn::server {

// Workers that share every link: those of a host, or one worker.
struct ReachVertex {
  std::string host;  // unique for a worker without a host
  uint64_t memory_bytes = 0;
  int workers = 0;
  std::string lowest_name;
  std::vector<bool> reaches;  // by vertex; symmetric
};

// Returns the indices of the best set, ascending: the most hosts, then the most memory, then the
// most workers, then the lowest name. Visits at most kMaxVisits sets, then returns the best so far.
std::vector<int> LargestReachableSet(const std::vector<ReachVertex>& vertices);

inline constexpr int kMaxVisits = 4096;

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_REACHABLE_SET_H_

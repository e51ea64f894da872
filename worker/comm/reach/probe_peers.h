// Finds the peers that this worker cannot reach.
// Tests: reach_test.cc
#ifndef RINGATTN_WORKER_COMM_REACH_PROBE_PEERS_H_
#define RINGATTN_WORKER_COMM_REACH_PROBE_PEERS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace ringattn::worker {

// Connects to all addresses ("host:port", numeric) at the same time. Returns the indices,
// ascending, of those that do not answer within `timeout` or that the network reports as
// unreachable. A peer that refuses the connection answers: its host is reached, and its process has
// ended. An empty or malformed address counts as reached, because nothing is known about it.
//   cancelled  ends the probe early if it returns true; the result is then empty. Polled every
//              50 ms, on this thread
std::vector<uint32_t> UnreachedPeers(const std::vector<std::string>& addresses,
                                     absl::Duration timeout,
                                     const std::function<bool()>& cancelled);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_REACH_PROBE_PEERS_H_

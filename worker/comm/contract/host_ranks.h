// Test ranks whose device memory is host memory.
#ifndef RINGATTN_WORKER_COMM_CONTRACT_HOST_RANKS_H_
#define RINGATTN_WORKER_COMM_CONTRACT_HOST_RANKS_H_

#include <functional>
#include <memory>
#include <vector>

#include "worker/comm/contract/ring_under_test.h"

namespace ringattn::worker {

// Creates options.world_size ranks, each with the transport that `make_transport` returns for it.
std::vector<std::unique_ptr<TestRank>> MakeHostRanks(
    const TestRankOptions& options,
    const std::function<std::unique_ptr<RingTransport>(int rank)>& make_transport);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CONTRACT_HOST_RANKS_H_

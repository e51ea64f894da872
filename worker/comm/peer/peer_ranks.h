// Ranks for the contract's cases (worker/comm/contract) whose memory peers can map, on GPUs or
// fakes of them.
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_RANKS_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_RANKS_H_

#include <memory>

#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/peer/peer_ring_transport.h"
#include "worker/device/cuda/vmm_memory.h"

namespace ringattn::worker {

// Returns the options of a rank on GPU `device`. Its memory is one region, from which all such
// ranks of the device allocate.
PeerTransportOptions TestPeerOptions(int device, RegionSharing sharing,
                                     const TestRankOptions& options);

// Returns a rank that allocates from the region of TestPeerOptions.
std::unique_ptr<TestRank> MakePeerRank(int device, RegionSharing sharing,
                                       std::unique_ptr<RingTransport> transport);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_RANKS_H_

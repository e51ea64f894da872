// The two phases of forming for in-process rings, for tests.
#ifndef RINGATTN_WORKER_COMM_INPROC_INPROC_RING_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_INPROC_INPROC_RING_TRANSPORT_H_

#include <memory>
#include <vector>

#include "worker/comm/communicator.h"

namespace ringattn::worker {

// Returns one transport per rank; they form rings with each other. Thread safe. May be destroyed in
// any order.
std::vector<std::unique_ptr<RingTransport>> MakeInProcessTransports(int world_size);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_INPROC_INPROC_RING_TRANSPORT_H_

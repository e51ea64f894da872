// In-process transport: ranks are threads of one process, and a transfer is a memcpy. For tests,
// and as the shortest implementation of the interface.
#ifndef RINGATTN_WORKER_COMM_INPROC_INPROC_COMMUNICATOR_H_
#define RINGATTN_WORKER_COMM_INPROC_INPROC_COMMUNICATOR_H_

#include <memory>
#include <vector>

#include "worker/comm/communicator.h"

namespace ringattn::worker {

// Returns one communicator per rank, connected to each other. They may be used from different
// threads and destroyed in any order. Aborting one aborts all of them.
std::vector<std::unique_ptr<Communicator>> MakeInProcessRing(int world_size);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_INPROC_INPROC_COMMUNICATOR_H_

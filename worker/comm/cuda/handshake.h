// The first exchange of a ring of GPUs: proof that every two ranks reach one another.
#ifndef RINGATTN_WORKER_COMM_CUDA_HANDSHAKE_H_
#define RINGATTN_WORKER_COMM_CUDA_HANDSHAKE_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"

namespace ringattn::worker {

constexpr int64_t HandshakeBytes(int world_size) { return 2 * world_size * sizeof(uint64_t); }

// Every rank tells every other its number and the generation. After it all connections
// stand, also those that a transport makes at the first transfer between two ranks.
// `memory`: HandshakeBytes of the communicator's device, current on this thread; not in
// use any more on return. UNAVAILABLE if a peer did not take part by `deadline` or said
// something else, CANCELLED, INTERNAL; the communicator is of no use then, aborted or not.
absl::Status Handshake(Communicator& communicator, void* memory, uint64_t generation,
                       absl::Time deadline, const std::atomic<bool>& cancelled);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_HANDSHAKE_H_

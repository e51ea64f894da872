// The first exchange of a GPU ring, which verifies that every two ranks reach each other.
#ifndef RINGATTN_WORKER_COMM_CUDA_HANDSHAKE_H_
#define RINGATTN_WORKER_COMM_CUDA_HANDSHAKE_H_

#include <atomic>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"

namespace ringattn::worker {

constexpr int64_t HandshakeBytes(int world_size) { return 2 * world_size * sizeof(uint64_t); }

// Every rank sends its rank and generation to every other rank. Afterwards all connections are
// established, including those that a transport opens at the first transfer between two ranks.
// `memory`: HandshakeBytes of the communicator's device, which must be current on this thread; not
// in use on return. Returns UNAVAILABLE if a peer did not take part by `deadline` or sent something
// else, CANCELLED, or INTERNAL. After an error the communicator must not be used any more.
absl::Status Handshake(Communicator& communicator, void* memory, uint64_t generation,
                       absl::Time deadline, const std::atomic<bool>& cancelled);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_HANDSHAKE_H_

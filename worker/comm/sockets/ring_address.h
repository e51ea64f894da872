// The address of this machine at which a ring transport listens for peers (--ring_address,
// --ring_interface).
#ifndef RINGATTN_WORKER_COMM_SOCKETS_RING_ADDRESS_H_
#define RINGATTN_WORKER_COMM_SOCKETS_RING_ADDRESS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/comm/sockets/owned_fd.h"

namespace ringattn::worker {

// Returns INVALID_ARGUMENT if peers cannot connect to `host`: it is empty or a wildcard address.
// Looks up no names.
absl::Status CheckRingAddress(const std::string& host);

// Returns a non-blocking TCP socket that is bound to a free port of `host`, a name or numeric
// address of this machine. If a name has several addresses, the first that this machine has
// counts. Returns INVALID_ARGUMENT if this machine has none of them, and CheckRingAddress's error.
// Blocks while a name is looked up.
absl::StatusOr<OwnedFd> BindRingAddress(const std::string& host);

// Returns the numeric address of a network interface: its first IPv4 address, else its first IPv6
// address that is not link-local. Returns INVALID_ARGUMENT if this machine has no interface of this
// name that is up and has such an address.
absl::StatusOr<std::string> AddressOfInterface(const std::string& name);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_SOCKETS_RING_ADDRESS_H_

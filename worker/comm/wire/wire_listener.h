// WireListener: the socket at which a rank accepts connections while a ring forms.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_LISTENER_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_LISTENER_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "worker/comm/sockets/owned_fd.h"
#include "worker/comm/sockets/socket_address.h"

namespace ringattn::worker {

// Thread safe.
class WireListener {
 public:
  // Listens on a free port of `host`, a name or numeric address of this machine. Returns
  // INVALID_ARGUMENT if this machine has no such address, or if peers cannot connect to it.
  static absl::StatusOr<std::unique_ptr<WireListener>> Open(const std::string& host);

  int fd() const { return fd_.get(); }
  // What peers connect to.
  const SocketAddress& address() const { return address_; }

 private:
  WireListener(OwnedFd fd, const SocketAddress& address) : fd_(std::move(fd)), address_(address) {}

  const OwnedFd fd_;
  const SocketAddress address_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_LISTENER_H_

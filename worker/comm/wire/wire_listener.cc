#include "worker/comm/wire/wire_listener.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "worker/comm/sockets/ring_address.h"

namespace ringattn::worker {
namespace {

// Ranks connect before all have called Connect, so their connections wait in this queue: 64 ranks
// with 8 connections each, twice.
constexpr int kBacklog = 1024;

}  // namespace

absl::StatusOr<std::unique_ptr<WireListener>> WireListener::Open(const std::string& host) {
  absl::StatusOr<OwnedFd> fd = BindRingAddress(host);
  if (!fd.ok()) return fd.status();
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (listen(fd->get(), kBacklog) != 0 ||
      getsockname(fd->get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen for ring peers on ", host, ": ", std::strerror(errno)));
  }
  const SocketAddress address = FromSockaddr(bound);
  if (IN6_IS_ADDR_LINKLOCAL(&address.ip)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen for ring peers on ", host,
                     ": peers cannot connect to a link-local IPv6 address"));
  }
  return std::unique_ptr<WireListener>(new WireListener(*std::move(fd), address));
}

}  // namespace ringattn::worker

#include "worker/comm/reach/reach_listener.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/comm/sockets/ring_address.h"
#include "worker/comm/sockets/socket_address.h"

namespace ringattn::worker {
namespace {

// One worker of each other host probes at a time.
constexpr int kBacklog = 128;
// Between two attempts to accept a connection without a free descriptor.
constexpr std::chrono::milliseconds kNoDescriptorPause{10};

}  // namespace

absl::StatusOr<std::unique_ptr<ReachListener>> ReachListener::Start(const std::string& host) {
  absl::StatusOr<OwnedFd> fd = BindRingAddress(host);
  if (!fd.ok()) return fd.status();
  OwnedFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  if (stop.get() < 0 || listen(fd->get(), kBacklog) != 0 ||
      getsockname(fd->get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen for probes on ", host, ": ", std::strerror(errno)));
  }
  return std::unique_ptr<ReachListener>(
      new ReachListener(*std::move(fd), std::move(stop), SocketText(bound, length)));
}

ReachListener::ReachListener(OwnedFd listener, OwnedFd stop, std::string address)
    : listener_(std::move(listener)),
      stop_(std::move(stop)),
      address_(std::move(address)),
      accepting_([this] { Accept(); }) {}

ReachListener::~ReachListener() {
  const uint64_t one = 1;
  (void)!write(stop_.get(), &one, sizeof(one));
  accepting_.join();
}

void ReachListener::Accept() const {
  while (true) {
    pollfd polled[] = {{listener_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
    if (poll(polled, 2, -1) < 0 && errno != EINTR) return;
    if (polled[1].revents != 0) return;
    if (polled[0].revents == 0) continue;
    const OwnedFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.get() >= 0) {
      // After a reset the kernel keeps no connection that waits for late packets.
      const linger reset{1, 0};
      (void)setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      std::this_thread::sleep_for(kNoDescriptorPause);
    }
  }
}

}  // namespace ringattn::worker

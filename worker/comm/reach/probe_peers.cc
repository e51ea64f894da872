#include "worker/comm/reach/probe_peers.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <utility>

#include "common/base/monotonic_time.h"
#include "worker/comm/sockets/owned_fd.h"
#include "worker/comm/sockets/socket_address.h"

namespace ringattn::worker {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

// One connection. Thread compatible.
class PeerProbe {
 public:
  explicit PeerProbe(const std::string& address) {
    sockaddr_storage peer{};
    const socklen_t length = ParseSocketText(address, &peer);
    if (length == 0) return;
    OwnedFd fd(socket(peer.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd.get() < 0) return;  // says nothing about the peer
    fd_.emplace(std::move(fd));
    reached_ = false;
    if (connect(fd_->get(), reinterpret_cast<const sockaddr*>(&peer), length) == 0) {
      End(0);
    } else if (errno != EINPROGRESS) {
      End(errno);
    }
  }

  bool pending() const { return fd_.has_value(); }
  bool reached() const { return reached_; }
  // REQUIRES: pending().
  int fd() const { return fd_->get(); }

  // The socket is writable or has failed.
  void Finish() {
    int error = 0;
    socklen_t length = sizeof(error);
    if (getsockopt(fd_->get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    End(error);
  }

 private:
  void End(int error) {
    // A reset closes the listener's side as well.
    reached_ = error == 0 || error == ECONNREFUSED || error == ECONNRESET;
    fd_.reset();
  }

  std::optional<OwnedFd> fd_;
  bool reached_ = true;
};

}  // namespace

std::vector<uint32_t> UnreachedPeers(const std::vector<std::string>& addresses,
                                     absl::Duration timeout,
                                     const std::function<bool()>& cancelled) {
  const absl::Time deadline = MonotonicNow() + timeout;
  std::vector<std::unique_ptr<PeerProbe>> probes;
  for (const std::string& address : addresses) {
    probes.push_back(std::make_unique<PeerProbe>(address));
  }
  while (true) {
    std::vector<pollfd> polled;
    std::vector<PeerProbe*> pending;
    for (const auto& probe : probes) {
      if (!probe->pending()) continue;
      polled.push_back({probe->fd(), POLLOUT, 0});
      pending.push_back(probe.get());
    }
    const absl::Duration left = deadline - MonotonicNow();
    if (pending.empty() || left <= absl::ZeroDuration()) break;
    if (cancelled()) return {};
    const int64_t pause_ms = absl::ToInt64Milliseconds(std::min(left, kPollInterval)) + 1;
    if (poll(polled.data(), polled.size(), static_cast<int>(pause_ms)) < 0 && errno != EINTR) break;
    for (size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents != 0) pending[i]->Finish();
    }
  }
  std::vector<uint32_t> unreached;
  for (size_t i = 0; i < probes.size(); ++i) {
    if (!probes[i]->reached()) unreached.push_back(static_cast<uint32_t>(i));
  }
  return unreached;
}

}  // namespace ringattn::worker

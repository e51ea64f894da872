#include "worker/comm/reach/probe_peers.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "common/base/monotonic_time.h"

namespace ringattn::worker {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

// One connection. Thread compatible.
class PeerProbe {
 public:
  explicit PeerProbe(const std::string& address) { Begin(address); }
  ~PeerProbe() { Close(); }
  PeerProbe(const PeerProbe&) = delete;
  PeerProbe& operator=(const PeerProbe&) = delete;

  bool pending() const { return fd_ >= 0; }
  bool reached() const { return reached_; }
  int fd() const { return fd_; }

  // The socket is writable or has failed.
  void Finish() {
    int error = 0;
    socklen_t length = sizeof(error);
    if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
    End(error);
  }

 private:
  void Begin(const std::string& address) {
    const size_t colon = address.rfind(':');
    if (colon == std::string::npos) return;
    std::string host = address.substr(0, colon);
    if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    if (getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found) != 0) return;
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
    fd_ = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd_ < 0) return;  // says nothing about the peer
    reached_ = false;
    if (connect(fd_, found->ai_addr, found->ai_addrlen) == 0) {
      End(0);
    } else if (errno != EINPROGRESS) {
      End(errno);
    }
  }

  void End(int error) {
    // A reset closes the listener's side as well.
    reached_ = error == 0 || error == ECONNREFUSED || error == ECONNRESET;
    Close();
  }

  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

  int fd_ = -1;
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

#include "worker/comm/reach/probe_listener.h"

#include <netdb.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::worker {
namespace {

// One worker of each other host probes at a time.
constexpr int kBacklog = 128;
// Between two attempts to accept a connection without a free descriptor.
constexpr std::chrono::milliseconds kNoDescriptorPause{10};

std::string NumericAddress(int fd) {
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0 ||
      getnameinfo(reinterpret_cast<const sockaddr*>(&bound), length, host, sizeof(host), port,
                  sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "";
  }
  return bound.ss_family == AF_INET6 ? absl::StrCat("[", host, "]:", port)
                                     : absl::StrCat(host, ":", port);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ProbeListener>> ProbeListener::Start(const std::string& host) {
  const auto failed = [&host](const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen for probes on ", host, ": ", why));
  };
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
    return failed(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const int stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const bool listens = fd >= 0 && stop >= 0 && bind(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                       listen(fd, kBacklog) == 0;
  if (!listens) {
    const int error = errno;
    if (fd >= 0) close(fd);
    if (stop >= 0) close(stop);
    return failed(std::strerror(error));
  }
  return std::unique_ptr<ProbeListener>(new ProbeListener(fd, stop, NumericAddress(fd)));
}

ProbeListener::ProbeListener(int listener, int stop, std::string address)
    : listener_(listener),
      stop_(stop),
      address_(std::move(address)),
      accepting_([this] { Accept(); }) {}

ProbeListener::~ProbeListener() {
  const uint64_t one = 1;
  (void)!write(stop_, &one, sizeof(one));
  accepting_.join();
  close(listener_);
  close(stop_);
}

void ProbeListener::Accept() const {
  while (true) {
    pollfd polled[] = {{listener_, POLLIN, 0}, {stop_, POLLIN, 0}};
    if (poll(polled, 2, -1) < 0 && errno != EINTR) return;
    if (polled[1].revents != 0) return;
    if (polled[0].revents == 0) continue;
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      // After a reset the kernel keeps no connection that waits for late packets.
      const linger reset{1, 0};
      (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
      close(fd);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      std::this_thread::sleep_for(kNoDescriptorPause);
    }
  }
}

}  // namespace ringattn::worker

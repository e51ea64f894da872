#include "common/wire/grpc_1_51/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/monotonic_time.h"
#include "common/observability/log.h"

namespace ringattn::wire {
namespace {

// At the connection limit, each new connection would otherwise check every entry.
constexpr absl::Duration kPruneInterval = absl::Milliseconds(100);
// Then the thread checks other events, such as Stop.
constexpr int kAcceptsInARow = 64;
// Pause after accept() fails for lack of descriptors or memory.
constexpr int kRestMs = 50;
// A peer that acknowledges nothing for this long is considered gone; twice the keepalive timeout.
constexpr unsigned kUserTimeoutMs = 20'000;

// GOAWAY(ENHANCE_YOUR_CALM) with its reason: RFC 9113, 6.8. It omits the SETTINGS frame that should
// precede it: gRPC clients then fail their calls with UNAVAILABLE and back off before they
// reconnect. After SETTINGS and GOAWAY one client connected 840 times in two seconds.
std::string Refusal() {
  constexpr absl::string_view kReason = "too many connections";
  std::string frames = std::string("\0\0", 2) + static_cast<char>(8 + kReason.size());
  frames += std::string("\7\0\0\0\0\0", 6);
  frames += std::string("\0\0\0\0\0\0\0\x0b", 8);
  return absl::StrCat(frames, kReason);
}

void Refuse(int connection) {
  static const std::string* const frames = new std::string(Refusal());
  const ssize_t ignored = send(connection, frames->data(), frames->size(), MSG_NOSIGNAL);
  (void)ignored;
  // Unread data from the peer would turn the close into a reset, which may overtake the reason.
  shutdown(connection, SHUT_WR);
  char discarded[512];
  for (int i = 0; i < 8 && recv(connection, discarded, sizeof(discarded), MSG_DONTWAIT) > 0; ++i) {
  }
  close(connection);
}

int OpenReserve() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

void SetPort(sockaddr* address, int port) {
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = htons(port);
  }
}

int PortOf(int socket) {
  sockaddr_storage self{};
  socklen_t size = sizeof(self);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&self), &size) != 0) return 0;
  return ntohs(self.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&self)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&self)->sin_port);
}

// Returns a bound, listening socket, or -1 and errno.
int ListenOn(const addrinfo& where) {
  const int fd = socket(where.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1;
  const int off = 0;
  // No SO_REUSEPORT: two servers on one port would share its connections at random.
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (where.ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (bind(fd, where.ai_addr, where.ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(const ListenerOptions& options) {
  std::unique_ptr<Listener> listener(new Listener(options));
  if (absl::Status status = listener->BindAll(); !status.ok()) return status;
  return listener;
}

absl::Status Listener::BindAll() {
  const std::string& wanted = options_.address;
  const auto failed = [&](const char* why) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", wanted, ": ", why));
  };
  const size_t colon = wanted.rfind(':');
  if (colon == std::string::npos) return failed("the address is not host:port");
  std::string host = wanted.substr(0, colon);
  const std::string given_host = host;
  if (host.size() > 1 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int unresolved = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                     wanted.c_str() + colon + 1, &hints, &found);
  if (unresolved != 0) return failed(gai_strerror(unresolved));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  // A name may have several addresses, with one port for all of them. A machine without IPv6 still
  // resolves names to IPv6 addresses, so one bound address is enough.
  int port = 0;
  int error = EAFNOSUPPORT;  // of the first address that cannot be bound
  for (addrinfo* where = found; where != nullptr; where = where->ai_next) {
    if (where->ai_family != AF_INET && where->ai_family != AF_INET6) continue;
    if (port != 0) SetPort(where->ai_addr, port);
    const int fd = ListenOn(*where);
    if (fd < 0) {
      if (error == EAFNOSUPPORT) error = errno;
      continue;
    }
    sockets_.push_back(fd);
    port = PortOf(fd);
  }
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  reserve_ = OpenReserve();
  if (sockets_.empty()) return failed(strerror(error));
  if (wake_ < 0 || reserve_ < 0) return failed("no file descriptor is left");
  address_ = absl::StrCat(given_host, ":", port);
  return absl::OkStatus();
}

Listener::~Listener() {
  Stop();
  for (const int fd : {wake_, reserve_}) {
    if (fd >= 0) close(fd);
  }
}

void Listener::AddTo(grpc::ServerBuilder* builder,
                     std::shared_ptr<grpc::ServerCredentials> credentials) {
  acceptor_ = builder->experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      std::move(credentials));
}

void Listener::Start() {
  StartWith([this](int listener, int connection) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.listener_fd = listener;
    parameters.fd = connection;
    acceptor_->HandleNewConnection(&parameters);
  });
}

void Listener::StartWith(std::function<void(int listener, int connection)> take) {
  take_ = std::move(take);
  thread_ = std::thread([this] { Run(); });
}

void Listener::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    const ssize_t ignored = write(wake_, &one, sizeof(one));
    (void)ignored;
    thread_.join();
  }
  for (const int fd : std::exchange(sockets_, {})) close(fd);
}

ListenerStats Listener::Stats() {
  absl::MutexLock lock(&mutex_);
  stats_.open = static_cast<int64_t>(table_.Prune());
  return stats_;
}

void Listener::Run() {
  std::vector<pollfd> entries = {{wake_, POLLIN, 0}};
  for (const int fd : sockets_) entries.push_back({fd, POLLIN, 0});
  bool resting = false;
  while (true) {
    // While pausing it waits only for Stop.
    const int ready = poll(entries.data(), resting ? 1 : entries.size(), resting ? kRestMs : -1);
    if (ready < 0 && errno != EINTR) resting = true;
    if (entries[0].revents != 0) return;
    resting = false;
    if (reserve_ < 0) reserve_ = OpenReserve();
    for (size_t i = 1; i < entries.size(); ++i) {
      if (!AcceptSome(entries[i].fd)) resting = true;
    }
  }
}

bool Listener::AcceptSome(int listener) {
  for (int i = 0; i < kAcceptsInARow; ++i) {
    const int connection = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (connection < 0) {
      // These errors concern only a connection that ended while it waited.
      if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      const int error = errno;
      LogError("cannot accept a connection", {{"listener", address_}, {"why", strerror(error)}});
      {
        absl::MutexLock lock(&mutex_);
        ++stats_.failed_accepts;
      }
      if (error == EMFILE || error == ENFILE) ShedOne(listener);
      return false;
    }
    const int on = 1;
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(connection, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof(kUserTimeoutMs));
    if (Admit(connection)) {
      take_(listener, connection);
    } else {
      Refuse(connection);
    }
  }
  return true;
}

bool Listener::Admit(int connection) {
  absl::MutexLock lock(&mutex_);
  const auto full = [&] { return static_cast<int64_t>(table_.size()) >= options_.max_connections; };
  if (full() && MonotonicNow() - pruned_at_ >= kPruneInterval) {
    table_.Prune();
    pruned_at_ = MonotonicNow();
  }
  if (full()) {
    ++stats_.refused;
    LogWarning("connection refused: too many",
               {{"listener", address_}, {"max_connections", options_.max_connections}});
    return false;
  }
  table_.Add(connection);
  return true;
}

void Listener::ShedOne(int listener) {
  if (reserve_ >= 0) close(std::exchange(reserve_, -1));
  const int connection = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (connection >= 0) Refuse(connection);
  reserve_ = OpenReserve();  // -1 while no descriptor is free; later rounds retry
}

}  // namespace ringattn::wire

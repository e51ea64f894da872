#include "common/process/listener_probe.h"

#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/base/monotonic_time.h"

namespace ringattn {
namespace {

// The client preface (RFC 9113, 3.4) and an empty SETTINGS frame.
constexpr char kHello[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0";
constexpr size_t kHelloBytes = 24 + 9;
static_assert(sizeof(kHello) == kHelloBytes, "the terminating zero is the frame's last byte");

// Returns a TLS ClientHello; empty if OpenSSL fails.
std::string TlsHello() {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()),
                                                                  SSL_CTX_free);
  if (context == nullptr) return "";
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl(SSL_new(context.get()), SSL_free);
  if (ssl == nullptr) return "";
  BIO* from_peer = BIO_new(BIO_s_mem());
  BIO* to_peer = BIO_new(BIO_s_mem());
  SSL_set_bio(ssl.get(), from_peer, to_peer);  // takes ownership of both
  constexpr unsigned char kHttp2[] = "\x02h2";
  SSL_set_alpn_protos(ssl.get(), kHttp2, sizeof(kHttp2) - 1);
  // returns at once: it has written the ClientHello and waits for the response
  SSL_connect(ssl.get());
  ERR_clear_error();
  std::string hello(BIO_ctrl_pending(to_peer), '\0');
  BIO_read(to_peer, hello.data(), static_cast<int>(hello.size()));
  return hello;
}

std::string HelloIn(ListenerProtocol speech) {
  return speech == ListenerProtocol::kTls ? TlsHello() : std::string(kHello, kHelloBytes);
}

absl::Status Waited(int fd, short events, absl::Time end) {
  pollfd entry{fd, events, 0};
  const int64_t left_ms = absl::ToInt64Milliseconds(end - MonotonicNow());
  const int ready = left_ms <= 0 ? 0 : poll(&entry, 1, static_cast<int>(left_ms));
  if (ready > 0) return absl::OkStatus();
  return absl::DeadlineExceededError("no answer");
}

absl::Status Converse(int fd, const addrinfo& target, const std::string& hello, absl::Time end) {
  if (connect(fd, target.ai_addr, target.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return absl::UnavailableError("cannot connect");
    if (absl::Status status = Waited(fd, POLLOUT, end); !status.ok()) return status;
  }
  // Fits into the socket's empty buffer.
  if (send(fd, hello.data(), hello.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(hello.size())) {
    return absl::UnavailableError("refused");
  }
  if (absl::Status status = Waited(fd, POLLIN, end); !status.ok()) return status;
  char byte;
  if (recv(fd, &byte, 1, 0) != 1)
    return absl::UnavailableError("connection closed without a response");
  return absl::OkStatus();
}

}  // namespace

absl::Status ProbeListener(const std::string& address, absl::Duration timeout,
                           ListenerProtocol speech) {
  const absl::Time end = MonotonicNow() + timeout;
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return absl::UnavailableError("no port in the address");
  std::string host = address.substr(0, colon);
  if (!host.empty() && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  // A wildcard address includes this machine.
  const int error = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found);
  if (error != 0) return absl::UnavailableError(gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  const std::string hello = HelloIn(speech);
  absl::Status status = absl::UnavailableError("no address");
  for (const addrinfo* target = found; target != nullptr; target = target->ai_next) {
    const int fd = socket(target->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return absl::ResourceExhaustedError("no descriptor left");
    const absl::Cleanup closer = [fd] { close(fd); };
    status = Converse(fd, *target, hello, end);
    if (status.ok()) break;
  }
  return status;
}

}  // namespace ringattn

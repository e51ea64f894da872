#include "client/load/http_get.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace ringattn::client::load {
namespace {

class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int get() const { return descriptor_; }

 private:
  const int descriptor_;
};

absl::Status Failure(const HttpUrl& url, absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(url.ToString(), ": ", what));
}

// Until the descriptor is ready for `events`.
absl::Status Await(const HttpUrl& url, int descriptor, short events, absl::Time deadline) {
  while (true) {
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now());
    pollfd waited{descriptor, events, 0};
    const int ready =
        left_ms <= 0 ? 0 : poll(&waited, 1, static_cast<int>(std::min<int64_t>(left_ms, 60000)));
    if (ready > 0) return absl::OkStatus();
    if (ready == 0 && left_ms <= 60000) {
      return absl::DeadlineExceededError(absl::StrCat(url.ToString(), ": no answer in time"));
    }
    if (ready < 0 && errno != EINTR) return Failure(url, std::strerror(errno));
  }
}

// Connected, or why not.
absl::StatusOr<int> Connect(const HttpUrl& url, const addrinfo& address, absl::Time deadline) {
  const int descriptor = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return Failure(url, std::strerror(errno));
  absl::Status status;
  if (connect(descriptor, address.ai_addr, address.ai_addrlen) != 0) {
    int error = errno;
    if (error == EINPROGRESS) {
      status = Await(url, descriptor, POLLOUT, deadline);
      socklen_t size = sizeof(error);
      if (status.ok()) getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (status.ok() && error != 0) status = Failure(url, std::strerror(error));
  }
  if (status.ok()) return descriptor;
  close(descriptor);
  return status;
}

absl::StatusOr<int> Connect(const HttpUrl& url, absl::Time deadline) {
  addrinfo wanted = {};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(url.host.c_str(), url.port.c_str(), &wanted, &found);
  if (error != 0) return Failure(url, gai_strerror(error));
  absl::StatusOr<int> connected = Failure(url, "the name has no address");
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    connected = Connect(url, *each, deadline);
    if (connected.ok()) break;
  }
  freeaddrinfo(found);
  return connected;
}

absl::Status Send(const HttpUrl& url, int descriptor, absl::string_view text, absl::Time deadline) {
  while (!text.empty()) {
    if (absl::Status status = Await(url, descriptor, POLLOUT, deadline); !status.ok()) {
      return status;
    }
    const ssize_t sent = send(descriptor, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) return Failure(url, std::strerror(errno));
    if (sent > 0) text.remove_prefix(static_cast<size_t>(sent));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadAll(const HttpUrl& url, int descriptor, absl::Time deadline) {
  std::string text;
  char block[16 << 10];
  while (true) {
    if (absl::Status status = Await(url, descriptor, POLLIN, deadline); !status.ok()) return status;
    const ssize_t got = recv(descriptor, block, sizeof(block), 0);
    if (got == 0) return text;
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got < 0) return Failure(url, std::strerror(errno));
    text.append(block, static_cast<size_t>(got));
    if (text.size() > kMaxPageBytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat(url.ToString(), ": is over ", kMaxPageBytes, " bytes"));
    }
  }
}

}  // namespace

std::string HttpUrl::ToString() const {
  const bool brackets = absl::StrContains(host, ':');
  return absl::StrCat("http://", brackets ? "[" : "", host, brackets ? "]" : "", ":", port, path);
}

absl::StatusOr<HttpUrl> ParseHttpUrl(absl::string_view text) {
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" ", why));
  };
  absl::string_view rest = text;
  if (absl::StartsWith(rest, "https://")) return wrong("is https, only http is served");
  if (!absl::ConsumePrefix(&rest, "http://")) return wrong("is no http://host:port/path");
  HttpUrl url;
  const size_t slash = rest.find('/');
  url.path = slash == absl::string_view::npos ? "/metrics" : std::string(rest.substr(slash));
  absl::string_view authority = rest.substr(0, slash);
  if (authority.find('@') != absl::string_view::npos) return wrong("has a user, which is not sent");
  url.port = "80";
  const size_t bracket = authority.find(']');
  const size_t colon = authority.rfind(':');
  if (colon != absl::string_view::npos && (bracket == absl::string_view::npos || colon > bracket)) {
    url.port = std::string(authority.substr(colon + 1));
    authority = authority.substr(0, colon);
    int port = 0;
    if (!absl::SimpleAtoi(url.port, &port) || port < 1 || port > 65535) {
      return wrong("has a port that is none");
    }
  }
  if (absl::ConsumePrefix(&authority, "[") && !absl::ConsumeSuffix(&authority, "]")) {
    return wrong("has half a bracket");
  }
  if (authority.empty()) return wrong("has no host");
  for (const char letter : text) {
    if (letter <= ' ' || letter == 0x7f) return wrong("has a blank");
  }
  url.host = std::string(authority);
  return url;
}

absl::StatusOr<std::string> HttpGet(const HttpUrl& url, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  const absl::StatusOr<int> connected = Connect(url, deadline);
  if (!connected.ok()) return connected.status();
  const Socket socket(*connected);
  // 1.0: the body ends with the connection, and comes in one piece.
  absl::Status status = Send(
      url, socket.get(),
      absl::StrCat("GET ", url.path, " HTTP/1.0\r\nHost: ", url.host, ":", url.port, "\r\n\r\n"),
      deadline);
  if (!status.ok()) return status;
  absl::StatusOr<std::string> reply = ReadAll(url, socket.get(), deadline);
  if (!reply.ok()) return reply;
  const size_t line = reply->find("\r\n");
  const size_t head = reply->find("\r\n\r\n");
  if (!absl::StartsWith(*reply, "HTTP/1.") || head == std::string::npos) {
    return Failure(url, "does not speak HTTP");
  }
  const std::string first = reply->substr(0, line);
  if (first.size() < 12 || first.substr(9, 3) != "200") {
    return absl::FailedPreconditionError(absl::StrCat(url.ToString(), ": answers ", first));
  }
  reply->erase(0, head + 4);
  return reply;
}

}  // namespace ringattn::client::load

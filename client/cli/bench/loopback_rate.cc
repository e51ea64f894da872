#include "client/cli/bench/loopback_rate.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace ringattn::client::cli {
namespace {

constexpr size_t kWriteBytes = 4 << 20;  // as large as the client's chunks

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

void SendAll(int fd, int64_t bytes) {
  const std::vector<char> data(kWriteBytes, 1);
  while (bytes > 0) {
    const ssize_t sent = send(fd, data.data(), std::min<int64_t>(bytes, data.size()), MSG_NOSIGNAL);
    if (sent <= 0) return;  // the receiver sees the end and reports it
    bytes -= sent;
  }
}

// Both ends of one loopback connection.
class Connection {
 public:
  static absl::StatusOr<Connection> Open() {
    const Socket listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (listener.get() < 0 || bind(listener.get(), generic, length) != 0 ||
        listen(listener.get(), 1) != 0 || getsockname(listener.get(), generic, &length) != 0) {
      return absl::ErrnoToStatus(errno, "loopback listener");
    }
    Connection made;
    made.sender_ = Socket(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (made.sender_.get() < 0 || connect(made.sender_.get(), generic, length) != 0) {
      return absl::ErrnoToStatus(errno, "loopback connection");
    }
    made.receiver_ = Socket(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (made.receiver_.get() < 0) return absl::ErrnoToStatus(errno, "loopback connection");
    return made;
  }

  // Sends `bytes` through the connection. Returns false if it broke.
  bool Move(int64_t bytes) {
    std::thread thread(SendAll, sender_.get(), bytes);
    int64_t received = 0;
    while (received < bytes) {
      const ssize_t got = recv(receiver_.get(), buffer_.data(), buffer_.size(), 0);
      if (got <= 0) break;
      received += got;
    }
    shutdown(receiver_.get(), SHUT_RDWR);
    thread.join();
    return received >= bytes;
  }

 private:
  Socket sender_, receiver_;
  std::vector<char> buffer_ = std::vector<char>(kWriteBytes);
};

}  // namespace

absl::StatusOr<double> LoopbackBytesPerSecond(int64_t bytes, int connections) {
  std::vector<Connection> opened;
  for (int i = 0; i < connections; ++i) {
    auto connection = Connection::Open();
    if (!connection.ok()) return connection.status();
    opened.push_back(*std::move(connection));
  }
  const int64_t each = bytes / connections;
  std::atomic<int> broken{0};
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (Connection& connection : opened) {
    threads.emplace_back([&] { broken += !connection.Move(each); });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (broken > 0) return absl::InternalError("the loopback connection broke");
  return static_cast<double>(each * connections) / seconds;
}

}  // namespace ringattn::client::cli

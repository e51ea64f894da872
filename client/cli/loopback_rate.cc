#include "client/cli/loopback_rate.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "absl/status/status.h"

namespace ringattn::cli {
namespace {

constexpr size_t kWriteBytes = 4 << 20;  // as large as the client's chunks

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

void SendAll(int fd, int64_t bytes) {
  const std::vector<char> data(kWriteBytes, 1);
  while (bytes > 0) {
    const ssize_t sent =
        send(fd, data.data(), std::min<int64_t>(bytes, data.size()), MSG_NOSIGNAL);
    if (sent <= 0) return;  // the receiver sees the end and reports it
    bytes -= sent;
  }
}

}  // namespace

absl::StatusOr<double> LoopbackBytesPerSecond(int64_t bytes) {
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
  const Socket sender(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (sender.get() < 0 || connect(sender.get(), generic, length) != 0) {
    return absl::ErrnoToStatus(errno, "loopback connection");
  }
  const Socket receiver(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (receiver.get() < 0) return absl::ErrnoToStatus(errno, "loopback connection");

  std::vector<char> buffer(kWriteBytes);
  const auto start = std::chrono::steady_clock::now();
  std::thread thread(SendAll, sender.get(), bytes);
  int64_t received = 0;
  while (received < bytes) {
    const ssize_t got = recv(receiver.get(), buffer.data(), buffer.size(), 0);
    if (got <= 0) break;
    received += got;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  shutdown(receiver.get(), SHUT_RDWR);
  thread.join();
  if (received < bytes) return absl::InternalError("the loopback connection broke");
  return static_cast<double>(bytes) / seconds;
}

}  // namespace ringattn::cli

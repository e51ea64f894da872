// OwnedFd: a file descriptor that is closed unless it is released.
#ifndef RINGATTN_WORKER_COMM_SOCKETS_OWNED_FD_H_
#define RINGATTN_WORKER_COMM_SOCKETS_OWNED_FD_H_

#include <unistd.h>

#include <utility>

namespace ringattn::worker {

// Not thread safe.
class OwnedFd {
 public:
  // -1: none.
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(OwnedFd&& other) noexcept : fd_(other.release()) {}
  OwnedFd& operator=(OwnedFd&&) = delete;
  ~OwnedFd() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_SOCKETS_OWNED_FD_H_

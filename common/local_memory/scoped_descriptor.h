// ScopedDescriptor: owns a file descriptor and closes it.
#ifndef RINGATTN_COMMON_LOCAL_MEMORY_SCOPED_DESCRIPTOR_H_
#define RINGATTN_COMMON_LOCAL_MEMORY_SCOPED_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace ringattn {

// Not thread safe.
class ScopedDescriptor {
 public:
  ScopedDescriptor() = default;
  explicit ScopedDescriptor(int fd) : fd_(fd) {}
  ScopedDescriptor(ScopedDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ScopedDescriptor& operator=(ScopedDescriptor&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~ScopedDescriptor() { Close(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void Close() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LOCAL_MEMORY_SCOPED_DESCRIPTOR_H_

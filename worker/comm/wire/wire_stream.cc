#include "worker/comm/wire/wire_stream.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ringattn::worker {

WireStream::~WireStream() { close(fd_); }

void WireStream::Shutdown() { shutdown(fd_, SHUT_RDWR); }

WireStream::Result WireStream::Failed(int error) {
  switch (error) {
    case EAGAIN:
    case EINTR:
    case EINPROGRESS:
      return {};
    case ECONNRESET:
    case EPIPE:
      return {.failure = WireFailure::kReset, .why = "the peer reset the connection"};
    case ETIMEDOUT:
      return {.failure = WireFailure::kTimeout, .why = "the peer does not answer"};
    default:
      return {.failure = WireFailure::kOther, .why = std::strerror(error)};
  }
}

WireStream::Result WireStream::Read(char* data, size_t bytes) {
  const ssize_t got = recv(fd_, data, bytes, MSG_DONTWAIT);
  if (got > 0) return {.bytes = static_cast<size_t>(got)};
  if (got < 0) return Failed(errno);
  return {.failure = WireFailure::kClosed, .why = "the peer closed the connection"};
}

WireStream::Result WireStream::Write(const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(count);
  const ssize_t sent = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent >= 0 ? Result{.bytes = static_cast<size_t>(sent)} : Failed(errno);
}

}  // namespace ringattn::worker

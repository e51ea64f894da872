#include "common/wire/grpc_1_51/connection_table.h"

#include <sys/socket.h>

namespace ringattn::wire {
namespace {

// Returns 0 if `fd` is not an open socket; no socket has this cookie.
uint64_t CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

}  // namespace

// A reused descriptor replaces its old entry, whose socket has been closed.
void ConnectionTable::Add(int fd) { cookies_[fd] = CookieOf(fd); }

size_t ConnectionTable::Prune() {
  std::erase_if(cookies_, [](const auto& entry) { return CookieOf(entry.first) != entry.second; });
  return cookies_.size();
}

}  // namespace ringattn::wire

#include "common/wire/grpc_1_51/connection_table.h"

#include <sys/socket.h>

namespace ringattn::wire {
namespace {

// 0 if it is no open socket; no socket has this cookie.
uint64_t CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

}  // namespace

// A descriptor that comes again has been closed meanwhile: its entry is replaced.
void ConnectionTable::Add(int fd) { cookies_[fd] = CookieOf(fd); }

size_t ConnectionTable::Prune() {
  std::erase_if(cookies_, [](const auto& entry) { return CookieOf(entry.first) != entry.second; });
  return cookies_.size();
}

}  // namespace ringattn::wire

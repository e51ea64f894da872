#include "worker/comm/sockets/socket_address.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <cstring>

namespace ringattn::worker {

SocketAddress FromSockaddr(const sockaddr_storage& address) {
  SocketAddress result;
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    result.ip.s6_addr[10] = result.ip.s6_addr[11] = 0xff;
    std::memcpy(&result.ip.s6_addr[12], &v4.sin_addr, sizeof(v4.sin_addr));
    result.port = ntohs(v4.sin_port);
  } else {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    result.ip = v6.sin6_addr;
    result.port = ntohs(v6.sin6_port);
  }
  return result;
}

socklen_t ToSockaddr(const SocketAddress& address, sockaddr_storage* storage) {
  *storage = {};
  if (IN6_IS_ADDR_V4MAPPED(&address.ip)) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(address.port);
    std::memcpy(&v4->sin_addr, &address.ip.s6_addr[12], sizeof(v4->sin_addr));
    return sizeof(*v4);
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(storage);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(address.port);
  v6->sin6_addr = address.ip;
  return sizeof(*v6);
}

std::string IpText(const sockaddr_storage& address, socklen_t length) {
  char host[NI_MAXHOST] = "?";
  (void)getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host, sizeof(host),
                    nullptr, 0, NI_NUMERICHOST);
  return host;
}

}  // namespace ringattn::worker

#include "worker/comm/sockets/socket_address.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"

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

std::string SocketText(const sockaddr_storage& address, socklen_t length) {
  const std::string ip = IpText(address, length);
  const int port = FromSockaddr(address).port;
  return address.ss_family == AF_INET6 ? absl::StrCat("[", ip, "]:", port)
                                       : absl::StrCat(ip, ":", port);
}

socklen_t ParseSocketText(const std::string& text, sockaddr_storage* address) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return 0;
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), text.c_str() + colon + 1, &hints, &found) != 0) return 0;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  *address = {};
  std::memcpy(address, found->ai_addr, found->ai_addrlen);
  return found->ai_addrlen;
}

}  // namespace ringattn::worker

// Addresses of sockets: as a value that fits into messages (SocketAddress), and as text.
#ifndef RINGATTN_WORKER_COMM_SOCKETS_SOCKET_ADDRESS_H_
#define RINGATTN_WORKER_COMM_SOCKETS_SOCKET_ADDRESS_H_

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

namespace ringattn::worker {

struct SocketAddress {
  in6_addr ip{};      // IPv4 addresses are mapped
  uint16_t port = 0;  // host byte order
};

// REQUIRES: the address is one of IPv4 or IPv6. Loses the scope of an IPv6 address.
SocketAddress FromSockaddr(const sockaddr_storage& address);

// Stores the address for connecting and returns its length: of IPv4 if it is a mapped one, so that
// hosts without IPv6 can use it.
socklen_t ToSockaddr(const SocketAddress& address, sockaddr_storage* storage);

// Returns the numeric IP address, without the port.
std::string IpText(const sockaddr_storage& address, socklen_t length);

// Returns the numeric address "host:port", with brackets around IPv6 addresses.
std::string SocketText(const sockaddr_storage& address, socklen_t length);

// Stores the address that SocketText returned and returns its length, or 0 if the text is not such
// an address. Looks up no names.
socklen_t ParseSocketText(const std::string& text, sockaddr_storage* address);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_SOCKETS_SOCKET_ADDRESS_H_

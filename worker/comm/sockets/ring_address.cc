#include "worker/comm/sockets/ring_address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/comm/sockets/socket_address.h"

namespace ringattn::worker {
namespace {

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// Returns the addresses of `host`. On errors, none, and getaddrinfo's error in *error.
Addresses Lookup(const std::string& host, int flags, int* error) {
  addrinfo hints{};
  hints.ai_flags = flags;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  *error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  return {*error == 0 ? found : nullptr, freeaddrinfo};
}

bool IsWildcard(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr == htonl(INADDR_ANY);
  }
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&v6)) return std::memcmp(&v6.s6_addr[12], "\0\0\0\0", 4) == 0;
  return IN6_IS_ADDR_UNSPECIFIED(&v6);
}

}  // namespace

absl::Status CheckRingAddress(const std::string& host) {
  int error = 0;
  const Addresses numeric = Lookup(host, AI_NUMERICHOST, &error);
  if (!host.empty() && (numeric == nullptr || !IsWildcard(*numeric->ai_addr))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the ring address is \"", host,
                   "\"; it must be a name or an address of this machine that the other workers can "
                   "connect to"));
}

absl::StatusOr<OwnedFd> BindRingAddress(const std::string& host) {
  if (absl::Status status = CheckRingAddress(host); !status.ok()) return status;
  const auto failed = [&host](const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen for ring peers on ", host, ": ", why));
  };
  int error = 0;
  const Addresses found = Lookup(host, 0, &error);
  if (error != 0) return failed(gai_strerror(error));
  for (const addrinfo* each = found.get(); each != nullptr; each = each->ai_next) {
    OwnedFd fd(socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd.get() >= 0 && bind(fd.get(), each->ai_addr, each->ai_addrlen) == 0) return fd;
    error = errno;
  }
  return failed(std::strerror(error));
}

absl::StatusOr<std::string> AddressOfInterface(const std::string& name) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot list network interfaces: ", std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(first, freeifaddrs);
  std::set<std::string> usable;
  std::string v6;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if ((entry->ifa_flags & IFF_UP) == 0 || entry->ifa_addr == nullptr) continue;
    sockaddr_storage address{};
    if (entry->ifa_addr->sa_family == AF_INET) {
      std::memcpy(&address, entry->ifa_addr, sizeof(sockaddr_in));
      usable.insert(entry->ifa_name);
      if (entry->ifa_name == name) return IpText(address, sizeof(sockaddr_in));
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      std::memcpy(&address, entry->ifa_addr, sizeof(sockaddr_in6));
      if (IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr))
        continue;
      usable.insert(entry->ifa_name);
      if (entry->ifa_name == name && v6.empty()) v6 = IpText(address, sizeof(sockaddr_in6));
    }
  }
  if (!v6.empty()) return v6;
  return absl::InvalidArgumentError(absl::StrCat(
      "network interface \"", name, "\" is not up or has no address; this machine has ",
      usable.empty() ? "none with an address" : absl::StrJoin(usable, ", ")));
}

}  // namespace ringattn::worker

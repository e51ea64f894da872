#include "worker/location/worker_location.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <map>
#include <memory>
#include <vector>

#include "common/local_memory/local_socket.h"

namespace ringattn::worker {
namespace {

// The coordinator accepts up to 64 of each (server/core/ring/registration_rules.cc).
constexpr int kMaxInterfaces = 16;
constexpr int kMaxAddresses = 16;

// Empty: not an address that another machine could use.
std::string AddressText(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address == nullptr) return "";
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text));
  } else if (address->sa_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
    if (!IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) {
      inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text));
    }
  }
  return text;
}

// Returns the addresses of each interface that is up, without loopback.
std::map<std::string, std::vector<std::string>> Interfaces() {
  std::map<std::string, std::vector<std::string>> interfaces;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return interfaces;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(first, freeifaddrs);
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if ((entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_LOOPBACK) != 0) continue;
    std::string address = AddressText(entry->ifa_addr);
    if (!address.empty()) interfaces[entry->ifa_name].push_back(std::move(address));
  }
  return interfaces;
}

}  // namespace

v1::WorkerLocation MakeLocation(const LocationOptions& options,
                                std::optional<uint64_t> device_slot) {
  v1::WorkerLocation location;
  location.set_host(options.host_id.empty() ? HostId() : options.host_id);
  location.set_accelerator_domain(options.accelerator_domain);
  location.set_zone(options.zone);
  const std::optional<uint64_t> slot = options.slot.has_value() ? options.slot : device_slot;
  if (slot.has_value()) location.set_slot(*slot);
  for (const auto& [name, addresses] : Interfaces()) {
    if (location.interfaces_size() == kMaxInterfaces) break;
    v1::NetworkInterface* interface = location.add_interfaces();
    interface->set_name(name);
    for (const std::string& address : addresses) {
      if (interface->addresses_size() < kMaxAddresses) interface->add_addresses(address);
    }
  }
  return location;
}

}  // namespace ringattn::worker

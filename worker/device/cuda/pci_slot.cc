#include "worker/device/cuda/pci_slot.h"

#include <fstream>

#include "absl/strings/str_format.h"

namespace ringattn::worker {

uint64_t PciSlot(const PciAddress& address, const std::string& sysfs) {
  std::ifstream file(absl::StrFormat("%s/bus/pci/devices/%04x:%02x:%02x.0/numa_node", sysfs,
                                     address.domain, address.bus, address.device));
  int node = -1;  // also the kernel's value for a machine without nodes
  file >> node;
  const uint64_t known_node = node > 0 ? static_cast<uint64_t>(node) & 0xff : 0;
  return known_node << 48 | uint64_t{address.domain} << 16 | uint64_t{address.bus & 0xff} << 8 |
         (address.device & 0xff);
}

}  // namespace ringattn::worker

// PciSlot: the position of a PCI device in its machine, as one number.
// Tests: pci_slot_test.cc
#ifndef RINGATTN_WORKER_DEVICE_CUDA_PCI_SLOT_H_
#define RINGATTN_WORKER_DEVICE_CUDA_PCI_SLOT_H_

#include <cstdint>
#include <string>

namespace ringattn::worker {

struct PciAddress {
  uint32_t domain = 0;
  uint32_t bus = 0;
  uint32_t device = 0;
};

// Returns a number that orders devices by NUMA node, then by PCI address. The kernel reports the
// node; if it does not, the node is 0. `sysfs` is replaced by tests.
uint64_t PciSlot(const PciAddress& address, const std::string& sysfs = "/sys");

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_PCI_SLOT_H_

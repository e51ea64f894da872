#include "worker/device/cuda/pci_slot.h"

#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(PciSlotTest, NodesComeBeforeAddresses) {
  const std::string sysfs = testing::TempDir() + "/sysfs";
  const auto set_node = [&](const std::string& device, int node) {
    const std::string folder = sysfs + "/bus/pci/devices/" + device;
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/numa_node") << node << "\n";
  };
  set_node("0000:1b:00.0", 1);
  set_node("0000:a3:00.0", 0);
  set_node("0001:01:00.0", -1);
  EXPECT_EQ(PciSlot({0, 0x1b, 0}, sysfs), uint64_t{1} << 48 | 0x1b00);
  EXPECT_EQ(PciSlot({0, 0xa3, 0}, sysfs), 0xa300u);
  EXPECT_EQ(PciSlot({1, 1, 0}, sysfs), 0x10100u);
  EXPECT_EQ(PciSlot({0, 2, 3}, sysfs), 0x203u);  // unknown to the kernel
  EXPECT_LT(PciSlot({0, 0xa3, 0}, sysfs), PciSlot({0, 0x1b, 0}, sysfs));
}

}  // namespace
}  // namespace ringattn::worker

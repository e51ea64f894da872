#include "worker/comm/nccl/rdma_devices.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

class RdmaDevicesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    unsetenv("NCCL_IB_DISABLE");
    unsetenv("NCCL_NET");
    std::filesystem::remove_all(folder_);
  }

  void AddPort(const std::string& device, int port, const std::string& state) {
    const std::filesystem::path path =
        std::filesystem::path(folder_) / device / "ports" / std::to_string(port);
    std::filesystem::create_directories(path);
    std::ofstream(path / "state") << state << "\n";
  }

  const std::string folder_ = ::testing::TempDir() + "/infiniband";
};

TEST_F(RdmaDevicesTest, ReturnsDevicesWithAnActivePort) {
  EXPECT_EQ(ActiveRdmaDevices(folder_), "");
  AddPort("mlx5_0", 1, "1: DOWN");
  EXPECT_EQ(ActiveRdmaDevices(folder_), "");
  AddPort("mlx5_2", 1, "4: ACTIVE");
  AddPort("mlx5_1", 1, "2: INIT");
  AddPort("mlx5_1", 2, "4: ACTIVE");
  EXPECT_EQ(ActiveRdmaDevices(folder_), "mlx5_1,mlx5_2");
}

TEST_F(RdmaDevicesTest, ReturnsNothingThatNcclDoesNotUse) {
  AddPort("mlx5_0", 1, "4: ACTIVE");
  setenv("NCCL_IB_DISABLE", "0", 1);
  EXPECT_EQ(ActiveRdmaDevices(folder_), "mlx5_0");
  setenv("NCCL_IB_DISABLE", "1", 1);
  EXPECT_EQ(ActiveRdmaDevices(folder_), "");
  unsetenv("NCCL_IB_DISABLE");
  setenv("NCCL_NET", "socket", 1);
  EXPECT_EQ(ActiveRdmaDevices(folder_), "");
}

}  // namespace
}  // namespace ringattn::worker

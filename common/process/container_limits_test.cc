#include "common/process/container_limits.h"

#include <filesystem>
#include <fstream>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

class ContainerLimitsTest : public testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    const std::filesystem::path path = root_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  ContainerLimits Read() const { return ReadContainerLimits(root_.string()); }

 private:
  const std::filesystem::path root_ = std::filesystem::path(testing::TempDir()) /
                                      testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(ContainerLimitsTest, NoFilesAreNoLimits) {
  EXPECT_FALSE(Read().memory_bytes.has_value());
  EXPECT_FALSE(Read().cpus.has_value());
}

TEST_F(ContainerLimitsTest, VersionTwo) {
  Write("memory.max", "1073741824\n");
  Write("cpu.max", "150000 100000\n");
  EXPECT_EQ(Read().memory_bytes, int64_t{1} << 30);
  EXPECT_EQ(Read().cpus, 1.5);
}

TEST_F(ContainerLimitsTest, VersionTwoWithoutLimits) {
  Write("memory.max", "max\n");
  Write("cpu.max", "max 100000\n");
  EXPECT_FALSE(Read().memory_bytes.has_value());
  EXPECT_FALSE(Read().cpus.has_value());
}

TEST_F(ContainerLimitsTest, VersionOne) {
  Write("memory/memory.limit_in_bytes", "268435456\n");
  Write("cpu/cpu.cfs_quota_us", "50000\n");
  Write("cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Read().memory_bytes, int64_t{256} << 20);
  EXPECT_EQ(Read().cpus, 0.5);
}

TEST_F(ContainerLimitsTest, VersionOneWithoutLimits) {
  Write("memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("cpu/cpu.cfs_quota_us", "-1\n");
  Write("cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_FALSE(Read().memory_bytes.has_value());
  EXPECT_FALSE(Read().cpus.has_value());
}

}  // namespace
}  // namespace ringattn

#include "worker/device_name.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

TEST(DeviceName, ParsesTheThreeKinds) {
  EXPECT_TRUE(ParseDeviceName("auto")->automatic);
  EXPECT_FALSE(ParseDeviceName("cpu")->automatic);
  EXPECT_EQ(ParseDeviceName("cpu")->kind, DeviceKind::kCpu);
  EXPECT_EQ(ParseDeviceName("cuda:0")->kind, DeviceKind::kCuda);
  EXPECT_EQ(ParseDeviceName("cuda:13")->cuda_index, 13);
}

TEST(DeviceName, RejectsOtherNames) {
  for (const char* text : {"", "cuda", "cuda:", "cuda:-1", "cuda:+1", "cuda:1x", "cuda: 1",
                           "cuda:99999999999", "CUDA:0", "gpu", "cpu:0"}) {
    const auto name = ParseDeviceName(text);
    ASSERT_EQ(name.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(name.status().message()), testing::HasSubstr("cuda:N"));
  }
}

TEST(DeviceName, AutoAssignsGpuToEveryWorkerOrNone) {
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(ChooseDevice(4, 4, rank).kind, DeviceKind::kCuda);
    EXPECT_EQ(ChooseDevice(8, 4, rank).cuda_index, rank);
    EXPECT_EQ(ChooseDevice(3, 4, rank).kind, DeviceKind::kCpu);
    EXPECT_EQ(ChooseDevice(0, 4, rank).kind, DeviceKind::kCpu);
  }
  EXPECT_EQ(ChooseDevice(2, 1, 2).kind, DeviceKind::kCpu) << "no such GPU";
}

}  // namespace
}  // namespace ringattn::worker

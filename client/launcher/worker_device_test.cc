#include "client/launcher/worker_device.h"

#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

TEST(WorkerDevice, CudaIsOneGpuForEachWorker) {
  EXPECT_EQ(WorkerDevice("cuda", 0), "cuda:0");
  EXPECT_EQ(WorkerDevice("cuda", 7), "cuda:7");
}

TEST(WorkerDevice, OtherDevicesAreUnchanged) {
  for (const char* name : {"auto", "cpu", "cuda:3", "nonsense"}) {
    EXPECT_EQ(WorkerDevice(name, 1), name);
  }
}

}  // namespace
}  // namespace ringattn::client

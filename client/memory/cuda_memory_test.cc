// The tests that need no driver. The rest is in //tests/cuda_memory.
#include "client/memory/cuda_memory.h"

#include <dlfcn.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::HasSubstr;

TEST(CudaMemoryTest, AMissingDriverIsReported) {
  if (dlopen("libcuda.so.1", RTLD_LAZY) != nullptr) GTEST_SKIP() << "this machine has a driver";
  uint8_t byte = 0;
  for (const auto& status :
       {CudaMemory::Allocate(0, 1).status(), CudaMemory::AllocateLinear(0, 1).status(),
        CudaMemory::Adopt(&byte, 1).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("no CUDA driver: libcuda.so.1 cannot be loaded"));
  }
}

TEST(CudaMemoryTest, ZeroBytesAreRejectedFirst) {
  EXPECT_EQ(CudaMemory::Allocate(0, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CudaMemory::Adopt(nullptr, -1).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ringattn::client

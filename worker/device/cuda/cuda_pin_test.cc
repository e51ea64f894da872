// Copies from and to pinned host memory, on a GPU or with fakes. Part of cuda_device_test.
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "worker/device/cuda/cuda_device.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Pages of this process, like those of a client's region.
class Pages {
 public:
  explicit Pages(int64_t bytes) : bytes_(bytes) {
    void* const data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(data, MAP_FAILED);
    data_ = static_cast<uint8_t*>(data);
    for (int64_t i = 0; i < bytes; ++i) data_[i] = static_cast<uint8_t>(i * 2654435761u >> 11);
  }
  ~Pages() { munmap(data_, bytes_); }
  uint8_t* data() const { return data_; }

 private:
  const int64_t bytes_;
  uint8_t* data_ = nullptr;
};

TEST(CudaPinTest, CopiesPinnedMemoryWithoutStaging) {
  auto device = CudaDevice::Create({.device = 0, .pinned_pool_bytes = 32 * kMiB});
  ASSERT_TRUE(device.ok()) << device.status();
  const int64_t bytes = 24 * kMiB;
  const Pages source(bytes), target(bytes);
  std::memset(target.data(), 0, bytes);
  {
    auto pinned_source = (*device)->PinHost(source.data(), bytes);
    auto pinned_target = (*device)->PinHost(target.data(), bytes);
    ASSERT_TRUE(pinned_source.ok() && pinned_target.ok());
    auto memory = (*device)->Allocate(bytes);
    ASSERT_TRUE(memory.ok());
    auto upload = (*device)->BeginUpload({{(*memory)->data(), bytes}});
    ASSERT_TRUE(upload.ok());
    // The first byte is staged and the pinned memory follows it.
    ASSERT_TRUE((*upload)->Append(source.data(), 1).ok());
    ASSERT_TRUE((*upload)->AppendPinned(source.data() + 1, 5 * kMiB).ok());
    ASSERT_TRUE((*upload)->AppendPinned(source.data() + 1 + 5 * kMiB, bytes - 5 * kMiB - 1).ok());
    auto events = (*upload)->Finish();
    ASSERT_TRUE(events.ok());
    for (const EventRef& event : *events) ASSERT_TRUE(event->Wait(absl::InfiniteFuture()).ok());
    auto copied = (*device)->CopyToPinned(target.data(), (*memory)->data(), bytes);
    ASSERT_TRUE(copied.ok());
    ASSERT_TRUE((*copied)->Wait(absl::InfiniteFuture()).ok());
    EXPECT_GE((*copied)->end_time(), (*copied)->begin_time());
    EXPECT_EQ(std::memcmp(source.data(), target.data(), bytes), 0);
  }
  // Unpinned memory can be pinned again.
  EXPECT_TRUE((*device)->PinHost(source.data(), bytes).ok());
}

TEST(CudaPinTest, RejectsPinningTwiceWithoutHarm) {
  auto device = CudaDevice::Create({.device = 0, .pinned_pool_bytes = 32 * kMiB});
  ASSERT_TRUE(device.ok()) << device.status();
  const Pages pages(4 * kMiB);
  auto pin = (*device)->PinHost(pages.data(), 4 * kMiB);
  ASSERT_TRUE(pin.ok());
  const auto again = (*device)->PinHost(pages.data(), 4 * kMiB);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kResourceExhausted);
  auto memory = (*device)->Allocate(kMiB);
  ASSERT_TRUE(memory.ok());
  EXPECT_TRUE((*device)->CopyFromHost((*memory)->data(), pages.data(), kMiB).ok());
}

}  // namespace
}  // namespace ringattn::worker

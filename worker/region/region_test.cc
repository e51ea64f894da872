#include "worker/region/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "common/local_memory/scoped_descriptor.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

std::shared_ptr<Region> MakeRegion() {
  ScopedDescriptor fd(memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(ftruncate(fd.get(), 8192), 0);
  return *Region::Map("id", fd.get(), 8192);
}

TEST(RegionTest, OutlivesItsDescriptor) {
  const std::shared_ptr<Region> region = MakeRegion();
  region->Populate(0, 1 << 20);
  region->Populate(1 << 20, 1 << 20);
  region->data()[8191] = 7;
  EXPECT_EQ(region->data()[8191], 7);
}

TEST(RegionTest, FencePreventsWrites) {
  const std::shared_ptr<Region> region = MakeRegion();
  ASSERT_TRUE(region->BeginWrite(1));
  ASSERT_TRUE(region->BeginWrite(2));
  region->EndWrite(2);
  region->Fence(2);
  EXPECT_FALSE(region->BeginWrite(2));
  std::atomic<bool> fenced{false};
  std::thread fence([&] {
    region->Fence(1);
    fenced = true;
  });
  while (region->BeginWrite(1)) region->EndWrite(1);
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_FALSE(fenced);  // a piece is still being written
  region->EndWrite(1);
  fence.join();
  EXPECT_TRUE(region->BeginWrite(3));
  region->EndWrite(3);
}

TEST(RegionTest, ReleasePreventsWrites) {
  const std::shared_ptr<Region> region = MakeRegion();
  region->Release();
  EXPECT_FALSE(region->BeginWrite(1));
}

TEST(RegionTest, FencesAreBounded) {
  const std::shared_ptr<Region> region = MakeRegion();
  for (uint64_t number = 1; number <= 5000; ++number) region->Fence(number);
  EXPECT_FALSE(region->BeginWrite(5000));
  EXPECT_TRUE(region->BeginWrite(1));  // the fence has been dropped
  region->EndWrite(1);
}

}  // namespace
}  // namespace ringattn::worker

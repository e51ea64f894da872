#include "worker/device/cpu/page_pool.h"

#include <cstring>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kBytes = 5'000'000;  // some huge pages and both ends

TEST(PagePoolTest, WholeMemoryIsWritable) {
  PagePool pool(0, absl::ZeroDuration());
  for (int64_t bytes : {int64_t{1}, int64_t{4096}, kBytes, int64_t{6} << 20}) {
    void* data = pool.Take(bytes);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 4096, 0u);
    std::memset(data, 0xab, bytes);
    pool.Give(data, bytes);
  }
}

TEST(PagePoolTest, ReusesPagesForSameSizeOnly) {
  PagePool pool(10 * kBytes, absl::InfiniteDuration());
  auto* first = static_cast<char*>(pool.Take(kBytes));
  first[123] = 45;
  pool.Give(first, kBytes);
  EXPECT_EQ(pool.kept_bytes(), kBytes);
  void* other = pool.Take(kBytes - 1);
  EXPECT_NE(other, first);
  auto* second = static_cast<char*>(pool.Take(kBytes));
  EXPECT_EQ(second, first);
  EXPECT_EQ(second[123], 45) << "the pages are new ones";
  EXPECT_EQ(pool.kept_bytes(), 0);
  pool.Give(second, kBytes);
  pool.Give(other, kBytes - 1);
}

TEST(PagePoolTest, KeptAndUsedMemoryStayWithinLimit) {
  PagePool pool(3 * kBytes, absl::InfiniteDuration());
  void* buffers[3];
  for (void*& buffer : buffers) buffer = pool.Take(kBytes);
  for (void* buffer : buffers) pool.Give(buffer, kBytes);
  EXPECT_EQ(pool.kept_bytes(), 3 * kBytes);
  void* large = pool.Take(2 * kBytes);  // the two that were released first are evicted
  EXPECT_EQ(pool.kept_bytes(), kBytes);
  EXPECT_EQ(pool.Take(kBytes), buffers[2]);
  void* beyond = pool.Take(kBytes);  // the pool does not limit used memory; the budget does
  ASSERT_NE(beyond, nullptr);
  pool.Give(beyond, kBytes);
  EXPECT_EQ(pool.kept_bytes(), 0);
  pool.Give(large, 2 * kBytes);
  pool.Give(buffers[2], kBytes);
}

TEST(PagePoolTest, ReturnsUnusedMemory) {
  PagePool pool(kBytes, absl::Milliseconds(1));
  pool.Give(pool.Take(kBytes), kBytes);
  while (pool.kept_bytes() > 0)
    absl::SleepFor(absl::Milliseconds(1));  // the test times out otherwise
}

TEST(PagePoolTest, FailedAllocationIsNotCounted) {
  PagePool pool(kBytes, absl::InfiniteDuration());
  pool.Give(pool.Take(kBytes), kBytes);
  EXPECT_EQ(pool.Take(int64_t{1} << 60), nullptr);
  void* data = pool.Take(kBytes);
  pool.Give(data, kBytes);
  EXPECT_EQ(pool.kept_bytes(), kBytes);
}

}  // namespace
}  // namespace ringattn::worker

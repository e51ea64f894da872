#include "client/memory/page_toucher.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kBytes = 40 * kMiB;
constexpr PageToucher::Options kSmall{.ahead_bytes = 4 * kMiB, .step_bytes = kMiB};

// A mapped file of kBytes without any page.
class SparseFile {
 public:
  SparseFile() {
    descriptor_ = open(testing::TempDir().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor_ < 0) {  // some file systems do not support files without a name
      std::string path = testing::TempDir() + "/sparseXXXXXX";
      descriptor_ = mkstemp(path.data());
      unlink(path.c_str());
    }
    EXPECT_EQ(ftruncate(descriptor_, kBytes), 0);
    data_ = static_cast<uint8_t*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0));
    EXPECT_NE(data_, MAP_FAILED);
    madvise(data_, kBytes, MADV_RANDOM);  // disables read-ahead
  }
  ~SparseFile() {
    munmap(data_, kBytes);
    close(descriptor_);
  }
  SparseFile(const SparseFile&) = delete;
  SparseFile& operator=(const SparseFile&) = delete;

  absl::Span<uint8_t> data() { return {data_, kBytes}; }

  // For each MiB, whether one page of it is in the page cache.
  std::vector<bool> Resident() const {
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> pages(kBytes / page);
    EXPECT_EQ(mincore(data_, kBytes, pages.data()), 0);
    std::vector<bool> resident;
    for (uint64_t at = 0; at < kBytes; at += kMiB) resident.push_back(pages[at / page] & 1);
    return resident;
  }

  // Waits until all MiB in this range are resident.
  bool Holds(size_t from, size_t until) const {
    for (int i = 0; i < 2000; ++i) {
      const std::vector<bool> resident = Resident();
      if (std::all_of(resident.begin() + static_cast<std::ptrdiff_t>(from),
                      resident.begin() + static_cast<std::ptrdiff_t>(until),
                      [](bool one) { return one; })) {
        return true;
      }
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }

  // Returns true if no MiB from there on is resident, after a moment in which they might become so.
  bool LacksFrom(size_t from) const {
    absl::SleepFor(absl::Milliseconds(100));
    const std::vector<bool> resident = Resident();
    return std::none_of(resident.begin() + static_cast<std::ptrdiff_t>(from), resident.end(),
                        [](bool one) { return one; });
  }

 private:
  int descriptor_ = -1;
  uint8_t* data_ = nullptr;
};

// Older kernels do not support it.
bool Serves() {
  SparseFile file;
  return madvise(file.data().data(), kMiB, 23) == 0;
}

TEST(PageToucherTest, StaysABoundedDistanceAhead) {
  if (!Serves()) GTEST_SKIP() << "this kernel is older than Linux 5.14";
  SparseFile file;
  ASSERT_TRUE(file.LacksFrom(0));
  PageToucher toucher(file.data(), kSmall);
  EXPECT_TRUE(file.Holds(0, 4));
  EXPECT_TRUE(file.LacksFrom(4));
  toucher.NoteFilled(0.1);
  EXPECT_TRUE(file.Holds(4, 8));
  EXPECT_TRUE(file.LacksFrom(8));
  // Backward steps, and NaN.
  for (const double share : {0.05, 0.0, -1.0, std::nan("")}) toucher.NoteFilled(share);
  EXPECT_TRUE(file.LacksFrom(8));
}

// It must not dirty pages again that have already been filled.
TEST(PageToucherTest, SkipsFilledPages) {
  if (!Serves()) GTEST_SKIP() << "this kernel is older than Linux 5.14";
  SparseFile file;
  PageToucher toucher(file.data(), kSmall);
  ASSERT_TRUE(file.Holds(0, 4));
  toucher.NoteFilled(0.5);
  EXPECT_TRUE(file.Holds(20, 24));
  EXPECT_TRUE(file.LacksFrom(24));
  const std::vector<bool> resident = file.Resident();
  EXPECT_FALSE(
      std::any_of(resident.begin() + 4, resident.begin() + 20, [](bool one) { return one; }));
  toucher.NoteFilled(INFINITY);
}

TEST(PageToucherTest, EndsWhileWaiting) {
  SparseFile file;
  for (int i = 0; i < 20; ++i) {
    const PageToucher toucher(file.data(), kSmall);
    if (i % 2 == 0) absl::SleepFor(absl::Milliseconds(3));
  }
}

TEST(PageToucherTest, ChangesNothing) {
  SparseFile file;
  const absl::Span<uint8_t> data = file.data();
  const auto pattern = [](uint64_t i) { return static_cast<uint8_t>(i * 7 + i / 4096); };
  PageToucher toucher(data, kSmall);
  for (uint64_t i = 0; i < kBytes; ++i) {
    data[i] = pattern(i);
    if (i % kMiB == 0) toucher.NoteFilled(static_cast<double>(i) / kBytes);
  }
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < kBytes; ++i) wrong += data[i] != pattern(i);
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace ringattn::client

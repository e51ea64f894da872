#include "worker/region/region_pinner.h"

#include <sys/mman.h>

#include <atomic>
#include <string>

#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/local_memory/scoped_descriptor.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/region/pinning_device.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kPiece = Region::kPinBytes;

std::shared_ptr<Region> MakeRegion(const std::string& id, int64_t bytes) {
  const ScopedDescriptor fd(memfd_create("region", MFD_CLOEXEC));
  EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
  return *Region::Map(id, fd.get(), bytes);
}

bool Becomes(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return false;
}

class RegionPinnerTest : public testing::Test {
 protected:
  CpuDevice cpu_{1, 1 << 20};
  PinningDevice device_{&cpu_};
  std::atomic<int64_t> told_{-1};
  std::function<void(int64_t)> on_pinned_ = [this](int64_t bytes) { told_ = bytes; };
};

TEST_F(RegionPinnerTest, PinsAllPiecesAndUnpinsThemWithRegion) {
  RegionPinner pinner(&device_, 10 * kPiece, on_pinned_);
  const int64_t bytes = 2 * kPiece + 4096;
  std::shared_ptr<Region> region = MakeRegion("a", bytes);
  pinner.Schedule(region);
  ASSERT_TRUE(Becomes([&] { return region->pinned_bytes() == bytes; }));
  EXPECT_EQ(device_.pinned_bytes(), bytes);
  EXPECT_EQ(told_, bytes);
  pinner.Schedule(region);  // scheduling twice has no effect
  region.reset();
  EXPECT_TRUE(Becomes([&] { return device_.pinned_bytes() == 0; }));
  EXPECT_TRUE(Becomes([&] { return pinner.pinned_bytes() == 0; }));
  EXPECT_EQ(told_, 0);
}

TEST_F(RegionPinnerTest, RespectsLimit) {
  RegionPinner pinner(&device_, 3 * kPiece, on_pinned_);
  std::shared_ptr<Region> first = MakeRegion("first", 2 * kPiece);
  const std::shared_ptr<Region> second = MakeRegion("second", 2 * kPiece);
  const std::shared_ptr<Region> third = MakeRegion("third", kPiece);
  pinner.Schedule(first);
  pinner.Schedule(second);
  pinner.Schedule(third);
  ASSERT_TRUE(Becomes([&] { return third->pinned_bytes() == kPiece; }));
  EXPECT_EQ(first->pinned_bytes(), 2 * kPiece);
  EXPECT_EQ(second->pinned_bytes(), 0);
  EXPECT_EQ(pinner.pinned_bytes(), 3 * kPiece);
}

TEST_F(RegionPinnerTest, FailedPinsAreNotCounted) {
  int pieces = 0;
  device_.before_pin = [&](int64_t) {
    return ++pieces == 2 ? absl::ResourceExhaustedError("no more") : absl::OkStatus();
  };
  RegionPinner pinner(&device_, 10 * kPiece, on_pinned_);
  const std::shared_ptr<Region> region = MakeRegion("a", 3 * kPiece);
  pinner.Schedule(region);
  ASSERT_TRUE(Becomes([&] { return pinner.pinned_bytes() == kPiece; }));
  EXPECT_EQ(region->pinned_bytes(), kPiece);
  const std::shared_ptr<Region> other = MakeRegion("b", kPiece);
  pinner.Schedule(other);
  EXPECT_TRUE(Becomes([&] { return other->pinned_bytes() == kPiece; }));
}

TEST_F(RegionPinnerTest, StopsIfDeviceDoesNotPin) {
  std::atomic<int> asked{0};
  device_.before_pin = [&](int64_t) {
    ++asked;
    return absl::UnimplementedError("none");
  };
  RegionPinner pinner(&device_, 10 * kPiece, on_pinned_);
  const std::shared_ptr<Region> region = MakeRegion("a", kPiece);
  pinner.Schedule(region);
  ASSERT_TRUE(Becomes([&] { return asked == 1 && pinner.pinned_bytes() == 0; }));
  absl::SleepFor(absl::Milliseconds(20));
  const std::shared_ptr<Region> other = MakeRegion("b", kPiece);
  pinner.Schedule(other);
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(asked, 1);
}

TEST_F(RegionPinnerTest, MayEndWhilePinningRegion) {
  const std::shared_ptr<Region> region = MakeRegion("a", 4 * kPiece);
  {
    device_.before_pin = [pieces = 0](int64_t) mutable {
      if (++pieces > 1)
        absl::SleepFor(absl::Milliseconds(300));  // the pinner is destroyed meanwhile
      return absl::OkStatus();
    };
    RegionPinner pinner(&device_, 10 * kPiece, on_pinned_);
    pinner.Schedule(region);
    ASSERT_TRUE(Becomes([&] { return region->pinned_bytes() >= kPiece; }));
  }
  EXPECT_LT(region->pinned_bytes(), region->bytes());
  EXPECT_EQ(device_.pinned_bytes(), region->pinned_bytes());
}

// A fake of the worker's operations with peers. It has some at first.
class Operations {
 public:
  void Set(bool has_some) {
    absl::MutexLock lock(&mutex_);
    has_none_ = !has_some;
  }
  AwaitNoPeers await_no_peers() {
    return [this](absl::Time deadline) {
      absl::MutexLock lock(&mutex_);
      return AwaitUntil(mutex_, absl::Condition(&has_none_), deadline);
    };
  }
  // The same without a deadline, for tests that a busy machine may delay.
  AwaitNoPeers await_no_peers_long() {
    return [this](absl::Time) {
      absl::MutexLock lock(&mutex_);
      return AwaitUntil(mutex_, absl::Condition(&has_none_), MonotonicNow() + absl::Seconds(20));
    };
  }

 private:
  absl::Mutex mutex_;
  bool has_none_ = false;
};

TEST_F(RegionPinnerTest, PinsWhileNoOperationHasPeers) {
  Operations operations;
  std::atomic<int> pins{0};
  device_.before_pin = [&](int64_t) {
    // The next operation starts while the first piece is being pinned.
    if (++pins == 1) operations.Set(true);
    return absl::OkStatus();
  };
  RegionPinner pinner(&device_, 10 * kPiece, on_pinned_, operations.await_no_peers_long());
  const std::shared_ptr<Region> region = MakeRegion("a", 2 * kPiece);
  pinner.Schedule(region);
  absl::SleepFor(absl::Milliseconds(30));
  EXPECT_EQ(pins, 0);
  operations.Set(false);
  ASSERT_TRUE(Becomes([&] { return pins == 1; }));
  absl::SleepFor(absl::Milliseconds(30));
  EXPECT_EQ(pins, 1);
  operations.Set(false);
  EXPECT_TRUE(Becomes([&] { return region->pinned_bytes() == 2 * kPiece; }));
}

TEST_F(RegionPinnerTest, PinsAtLastNextToOperationsWithPeers) {
  Operations operations;
  const absl::Time begin = MonotonicNow();
  RegionPinner pinner(&device_, 10 * kPiece, on_pinned_, operations.await_no_peers());
  const std::shared_ptr<Region> region = MakeRegion("a", 2 * kPiece);
  pinner.Schedule(region);
  EXPECT_TRUE(Becomes([&] { return region->pinned_bytes() == 2 * kPiece; }));
  EXPECT_GE(MonotonicNow() - begin, 2 * RegionPinner::kLongestWait);
}

TEST_F(RegionPinnerTest, DoesNotPinRegionThatIsReleasedMeanwhile) {
  Operations operations;
  RegionPinner pinner(&device_, 10 * kPiece, on_pinned_, operations.await_no_peers_long());
  const std::shared_ptr<Region> region = MakeRegion("a", kPiece);
  pinner.Schedule(region);
  absl::SleepFor(absl::Milliseconds(30));
  region->Release();
  operations.Set(false);
  EXPECT_TRUE(Becomes([&] { return pinner.pinned_bytes() == 0; }));
  EXPECT_EQ(region->pinned_bytes(), 0);
}

TEST_F(RegionPinnerTest, MayEndWhileOperationsHavePeers) {
  std::atomic<int> waits{0};
  const std::shared_ptr<Region> region = MakeRegion("a", 100 * kPiece);
  {
    RegionPinner pinner(&device_, 100 * kPiece, on_pinned_, [&](absl::Time deadline) {
      ++waits;
      absl::SleepFor(deadline - MonotonicNow());
      return false;
    });
    pinner.Schedule(region);
    ASSERT_TRUE(Becomes([&] { return waits > 0; }));
  }
  EXPECT_LT(region->pinned_bytes(), region->bytes());
}

TEST_F(RegionPinnerTest, DoesNotPinReleasedRegion) {
  RegionPinner pinner(&device_, 10 * kPiece, on_pinned_);
  const std::shared_ptr<Region> region = MakeRegion("a", kPiece);
  region->Release();
  pinner.Schedule(region);
  absl::SleepFor(absl::Milliseconds(30));
  EXPECT_EQ(region->pinned_bytes(), 0);
}

}  // namespace
}  // namespace ringattn::worker

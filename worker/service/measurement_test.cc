#include "worker/service/measurement.h"

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/testing/scalar_device.h"

namespace ringattn::worker {
namespace {

TEST(Measurement, TheLinkHasARateHoweverShortTheBudget) {
  for (const absl::Duration budget :
       {absl::ZeroDuration(), absl::Milliseconds(1), absl::Milliseconds(30)}) {
    for (int round = 0; round < 5; ++round) {
      const absl::Time begin = absl::Now();
      auto rate = MeasureLinkBytesPerSecond("127.0.0.1", budget);
      ASSERT_TRUE(rate.ok()) << rate.status();
      EXPECT_GT(*rate, 1e5);
      EXPECT_LT(*rate, 1e12);
      EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
    }
  }
  EXPECT_FALSE(MeasureLinkBytesPerSecond("no.such.host.invalid", absl::ZeroDuration()).ok());
}

// The scalar device computes fp32 only: what it refuses is reported, not guessed.
TEST(Measurement, ADeviceThatCannotComputeIsAnError) {
  ScalarDevice device;
  EXPECT_EQ(MeasureFlopsPerSecond(device, {}, absl::Milliseconds(10)).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(MeasureCallSeconds(device, absl::ZeroDuration()).status().code(),
            absl::StatusCode::kUnimplemented);
}

// 1 ms a call, far above what a call costs by itself.
class SlowToStart : public CpuDevice {
 public:
  SlowToStart() : CpuDevice(1, int64_t{1} << 30) {}
  EventRef Start(const PreparedCall& call, std::vector<EventRef> after,
                 RunControl* control) override {
    absl::SleepFor(absl::Milliseconds(1));
    return CpuDevice::Start(call, std::move(after), control);
  }
};

TEST(Measurement, ACallHasItsPrice) {
  CpuDevice device(1, int64_t{1} << 30);
  const auto quick = MeasureCallSeconds(device, absl::Milliseconds(5));
  ASSERT_TRUE(quick.ok()) << quick.status();
  EXPECT_GT(*quick, 0);
  SlowToStart slow;
  const auto dear = MeasureCallSeconds(slow, absl::ZeroDuration());
  ASSERT_TRUE(dear.ok()) << dear.status();
  EXPECT_GE(*dear, 0.9e-3);
  EXPECT_LT(*quick, *dear);
}

// Says when somebody has seen it end: until then it may touch its control.
class Asked : public Event {
 public:
  Asked(EventRef inner, std::atomic<int>* unasked) : inner_(std::move(inner)), unasked_(unasked) {
    ++*unasked_;
  }
  bool Done() const override { return Note(inner_->Done()); }
  absl::Status Wait(absl::Time deadline) const override {
    const absl::Status status = inner_->Wait(deadline);
    Note(inner_->Done());
    return status;
  }
  absl::Time begin_time() const override { return inner_->begin_time(); }
  absl::Time end_time() const override { return inner_->end_time(); }

 private:
  bool Note(bool done) const {
    if (done && !noted_.exchange(true)) --*unasked_;
    return done;
  }

  const EventRef inner_;
  std::atomic<int>* const unasked_;
  mutable std::atomic<bool> noted_{false};
};

class AskedDevice : public CpuDevice {
 public:
  AskedDevice() : CpuDevice(1, int64_t{1} << 30) {}
  EventRef Start(const PreparedCall& call, std::vector<EventRef> after,
                 RunControl* control) override {
    return std::make_shared<Asked>(CpuDevice::Start(call, std::move(after), control), &unasked);
  }
  std::atomic<int> unasked{0};
};

TEST(Measurement, LeavesNoCallBehindThatMayTouchItsControl) {
  AskedDevice device;
  ASSERT_TRUE(MeasureCallSeconds(device, absl::ZeroDuration()).ok());
  EXPECT_EQ(device.unasked, 0);
  ASSERT_TRUE(MeasureFlopsPerSecond(device, {.rows = 16, .heads = 1}, absl::ZeroDuration()).ok());
  EXPECT_EQ(device.unasked, 0);
}

}  // namespace
}  // namespace ringattn::worker

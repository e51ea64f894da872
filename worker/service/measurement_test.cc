#include "worker/service/measurement.h"

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/testing/scalar_device.h"

namespace ringattn {
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

}  // namespace
}  // namespace ringattn
